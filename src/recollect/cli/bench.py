"""`recollect bench`: measure recompute settings side by side and compare them with stored results."""

import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from recollect import __version__
from recollect.cli.commands import Bench
from recollect.cli.common import build_step, check_folder, wide_console, write_file
from recollect.lab.bench.measure import Subject, measure
from recollect.lab.bench.race import few_objects, keep_freed_memory, processor_name
from recollect.lab.bench.report import as_csv, as_markdown, notes, result_table, title
from recollect.lab.bench.results import BenchResults, check_comparable, compared
from recollect.lab.bench.settings import Setting, named_settings, parse_setting, read_settings
from recollect.lab.models.config import TransformerConfig, model_flops
from recollect.lab.train.optimizer_step import resolve_device
from recollect.printing import print_line
from recollect.quantities import parse_bytes

_SEED = 0
_TABLE_WIDTH = 240


def run_bench(command: Bench, console: Console) -> int:
    settings = settings_of(command)
    golden = None if command.golden is None else BenchResults.load(command.golden)
    limit_bytes = None if command.memory_limit is None else parse_bytes(command.memory_limit)
    for path in _files(command):
        check_folder(path)
    device = resolve_device(command.step.device)
    if device.type == "cpu":
        keep_freed_memory()
        if command.threads is not None:
            torch.set_num_threads(command.threads)
    with few_objects():
        subject = build_subject(command, device)
        versions = {"torch": torch.__version__, "recollect": __version__, "python": platform.python_version()}
        here: dict[str, Any] = {"machine": _machine(device), "versions": versions}
        here["workload"] = _workload(command, subject)
        if golden is not None and command.golden is not None:
            check_comparable(golden, command.golden, **here)
        rows, reference, rounds = measure(
            subject,
            settings,
            model_flops=_model_flops(command, subject),
            rounds=command.rounds,
            memory_limit_bytes=limit_bytes,
            report=lambda text: print_line(console, text, style="dim"),
        )
    results = BenchResults(**here, rounds=rounds, reference=reference, rows=rows, memory_limit_bytes=limit_bytes)
    if golden is not None and command.golden is not None:
        results = compared(results, golden, path=command.golden, threshold=command.threshold)
    _show(results, console)
    _write(command, results, console)
    return 1 if results.has_regression else 0


def settings_of(command: Bench) -> list[Setting]:
    words = command.recompute.fields()
    found = [Setting(words)] if words else []
    found += [parse_setting(text) for text in command.setting]
    found += [] if command.settings is None else read_settings(command.settings)
    return named_settings(found)


def build_subject(command: Bench, device: torch.device) -> Subject:
    """Build the model and its step, on random tokens, which routers send to all experts."""
    torch.manual_seed(_SEED)
    model, batch, optimizer = build_step(command.step, device)
    tokens = next(iter(batch.values()))
    config: Any = model.config
    tokens.random_(config.vocab_size)
    return Subject(
        model=model,
        optimizer=optimizer,
        batch=batch,
        num_microbatches=command.num_microbatches,
        num_tokens=tokens.numel(),
        device=device,
    )


def _model_flops(command: Bench, subject: Subject) -> float:
    """Return a step's model FLOPs: by formula, or for Hugging Face models three times the forward FLOPs."""
    if command.step.hf_config is not None:
        return 3 * subject.forward_flops()
    num_sequences = command.step.num_sequences * command.num_microbatches
    return model_flops(_dimensions(command), num_sequences=num_sequences, seq_length=command.step.seq_length)


def _dimensions(command: Bench) -> TransformerConfig:
    return command.step.model.dimensions(seq_length=command.step.seq_length)


def _workload(command: Bench, subject: Subject) -> dict[str, Any]:
    if command.step.hf_config is None:
        config: Mapping[str, Any] = asdict(_dimensions(command))
    else:
        hugging_face: Any = subject.model.config
        config = {key: value for key, value in hugging_face.to_diff_dict().items() if key != "transformers_version"}
    num_parameters = sum(parameter.numel() for parameter in subject.model.parameters())
    model = f"{type(subject.model).__name__}, {num_parameters / 1e6:,.1f} M parameters"
    return {"model": model, **subject.describe(), "config": dict(config)}


def _machine(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        return {"device": torch.cuda.get_device_name(device)}
    return {"device": processor_name() if device.type == "cpu" else device.type, "threads": torch.get_num_threads()}


def _show(results: BenchResults, console: Console) -> None:
    print_line(console, title(results))
    table = result_table(results, console.width if console.is_terminal else None)
    wide_console(console, _TABLE_WIDTH).print(table)
    for note in notes(results):
        print_line(console, note)


def _files(command: Bench) -> list[Path]:
    return [*command.out, *([] if command.save_golden is None else [command.save_golden])]


def _write(command: Bench, results: BenchResults, console: Console) -> None:
    writers = {".md": as_markdown, ".csv": as_csv}
    for path in _files(command):
        is_golden = path == command.save_golden
        text = results.to_json() + "\n" if is_golden or path.suffix == ".json" else writers[path.suffix](results)
        write_file(path, text, console)
