"""`recollect coverage`: show which layers of a training step a setting recomputes or offloads."""

import json
from typing import Any

import torch
from rich.console import Console

import recollect
from recollect.cli.commands import ShowCoverage
from recollect.cli.common import build_step, check_folder, write_file
from recollect.errors import RecollectError
from recollect.lab.bench.settings import Setting
from recollect.lab.train.optimizer_step import resolve_device
from recollect.printing import print_line


def run_coverage(command: ShowCoverage, console: Console) -> None:
    if command.json is not None:
        check_folder(command.json, "--json")
    flags, words = command.step, command.recompute.fields()
    model, batch, _ = build_step(flags, torch.device("meta") if flags.fake else resolve_device(flags.device))
    if command.gradient_checkpointing:
        _switch_on(model)
    if command.plan is not None:
        recollect.apply(model, recollect.Plan.load(command.plan))
    elif words:
        profile = recollect.record(model, batch, fake=flags.fake)
        recollect.apply(model, recollect.megatron_plan(profile, Setting(words).config))
    found = recollect.coverage(model, batch, fake=flags.fake)
    print_line(console, str(found))
    if command.json is not None:
        write_file(command.json, json.dumps(found.to_data(), indent=2) + "\n", console, flag="--json")


def _switch_on(model: Any) -> None:
    """Call the method of Hugging Face's models that switches checkpointing on: renamed in transformers 5.23."""
    try:
        (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
    except ValueError as problem:
        raise RecollectError(f"--gradient-checkpointing: {problem}") from None
