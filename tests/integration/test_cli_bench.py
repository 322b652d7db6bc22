"""`recollect bench`: real processes on tiny sizes, golden results there and back, running out of memory."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from recollect.applying import applied_to
from recollect.cli import bench, main
from recollect.lab.bench.measure import Subject, measure
from recollect.lab.bench.results import Row
from recollect.lab.bench.settings import parse_setting
from recollect.lab.models.gpt import GPTModel
from recollect.lab.models.sizes import NAMED_CONFIGS

STEP = ["--size", "tiny", "--num-layers", "2", "--micro-batch-size", "4", "--seq-length", "64", "--device", "cpu"]
QUICK = ["bench", *STEP, "--rounds", "1"]
BUDGET = ["--setting", "memory_budget 80%"]


def in_process(*args: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "recollect", *map(str, args)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def document(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def rows(path: Path) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in document(path)["rows"]}


def with_speed(path: Path, factor: float) -> None:
    """Make the stored results as if the machine had been so many times as fast."""
    data = document(path)
    for row in data["rows"]:
        if row["step_s"] is not None:
            row["step_s"] /= factor
    path.write_text(json.dumps(data))


def test_settings_are_measured_side_by_side(tmp_path: Path) -> None:
    files = [tmp_path / f"results.{suffix}" for suffix in ("md", "csv", "json")]
    done = in_process(*QUICK, "--rounds", 2, *BUDGET, "--setting", "memory_budget 1MiB", "--out", *files)
    assert done.returncode == 0, done.stderr
    found = rows(files[2])
    assert list(found) == ["none", "memory_budget 80%", "memory_budget 1MiB"]
    plain, lean, too_lean = found.values()
    for row in (plain, lean):
        assert row["result"] == "ok"
        # The prediction is above what is measured, by the KiB that it adds and no more than a few.
        assert 0 <= row["predicted_peak_bytes"] - row["peak_bytes"] < 4096
        assert row["step_p20_s"] <= row["step_s"] <= row["step_p80_s"]
        assert row["reserved_bytes"] is None
    assert lean["peak_bytes"] < 0.81 * plain["peak_bytes"]
    # A budget of 80 % may be had without computing a product again.
    assert lean["hardware_flops"] >= plain["hardware_flops"] > plain["model_flops"] == lean["model_flops"]
    assert too_lean["result"] == "OOM (predicted)"
    assert "no plan: the least possible peak is" in done.stdout
    for word in ("Measured results", "TFLOP/s/device", "reserved: not applicable on a CPU", f"Written to {files[0]}."):
        assert word in done.stdout
    assert "| none | " in files[0].read_text()
    with files[1].open(newline="") as file:
        table = {row["name"]: row for row in csv.DictReader(file)}
    assert float(table["none"]["tflops"]) == pytest.approx(plain["model_flops"] / plain["step_s"] / 1e12)


def test_golden_results_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    golden = tmp_path / "golden.json"
    assert main([*QUICK, *BUDGET, "--save-golden", str(golden)]) == 0
    again = [*QUICK, *BUDGET, "--golden", str(golden), "--threshold"]
    # Steps of milliseconds beside other work: nothing is said about times unless they differ by more than ten times.
    assert main([*again, "0.99"]) == 0
    with_speed(golden, 50.0)
    after = tmp_path / "after.json"
    capsys.readouterr()
    assert main([*again, "0.5", "--out", str(after)]) == 1
    assert "perf regression" in capsys.readouterr().out
    assert {row["result"] for row in rows(after).values()} == {"perf regression"}
    with_speed(golden, 1 / 2500)
    assert main([*again, "0.5", "--out", str(after)]) == 0
    assert {row["result"] for row in rows(after).values()} == {"faster"}


@pytest.fixture(scope="module")
def plain_golden(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Golden results of the step without recompute."""
    golden = tmp_path_factory.mktemp("golden") / "golden.json"
    assert main([*QUICK, "--save-golden", str(golden)]) == 0
    return golden.read_bytes()


@pytest.fixture
def golden(plain_golden: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "golden.json"
    path.write_bytes(plain_golden)
    return path


@pytest.mark.long
def test_what_is_above_the_limit_is_a_result_and_the_others_go_on(golden: Path, tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    peak_bytes = rows(golden)["none"]["peak_bytes"]
    budget_bytes = 8 * peak_bytes // 10
    lean = ["--setting", f"memory_budget {budget_bytes}", "--memory-limit", str(9 * peak_bytes // 10)]
    assert main([*QUICK, *lean, "--out", str(out), "--save-golden", str(golden)]) == 0
    plain, fits = rows(out).values()
    assert plain["result"] == "OOM (predicted)"
    assert plain["note"] == "predicted above the limit"
    assert plain["step_s"] is None
    assert fits["result"] == "ok"
    # The one that slowdowns are over is the first that runs.
    assert document(out)["reference"] == fits["name"]
    # Nothing runs.
    assert main([*QUICK, "--memory-limit", "1MiB", "--out", str(out)]) == 0
    assert rows(out)["none"]["result"] == "OOM (predicted)"
    # What did not fit before is no regression, what fitted is one.
    assert main([*QUICK, *lean, "--golden", str(golden), "--threshold", "0.99"]) == 0
    tighter = ["--setting", f"memory_budget {budget_bytes}", "--memory-limit", "1MiB"]
    assert main([*QUICK, *tighter, "--golden", str(golden)]) == 1


def test_megatrons_words_are_measured(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    words = ["--recompute-granularity", "selective", "--recompute-modules", "mlp", "layernorm"]
    more = ["--setting", "full uniform 1", "--setting", "full block 1"]
    assert main([*QUICK, *words, *more, "--out", str(out)]) == 0
    found = rows(out)
    assert list(found) == ["none", "selective mlp,layernorm", "full uniform 1", "full block 1"]
    for row in found.values():
        assert 0 <= row["predicted_peak_bytes"] - row["peak_bytes"] < 4096, row["name"]
    plain, selective, full, block = found.values()
    assert full["peak_bytes"] < selective["peak_bytes"] < plain["peak_bytes"]
    assert full["peak_bytes"] < block["peak_bytes"] < plain["peak_bytes"]
    assert full["hardware_flops"] > block["hardware_flops"] > plain["hardware_flops"]


class LateOutOfMemory(Subject):
    """Runs out of memory when it is timed without a plan, as a fragmented device may though its peak was measured."""

    def seconds(self) -> float:
        if not applied_to(self.model):
            raise torch.OutOfMemoryError("CUDA out of memory, in fragments")
        return super().seconds()


@pytest.mark.long
def test_a_reference_that_runs_out_of_memory_late_is_replaced() -> None:
    torch.manual_seed(0)
    model = GPTModel(NAMED_CONFIGS["llama-tiny"].changed(num_layers=2)).train()
    tokens = torch.randint(256, (4, 64))
    subject = LateOutOfMemory(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        batch={"tokens": tokens, "labels": tokens},
        num_microbatches=1,
        num_tokens=256,
        device=torch.device("cpu"),
    )
    settings = [parse_setting(text) for text in ("none", "full uniform 1", "memory_budget 80%")]
    (plain, full, lean), reference, _ = measure(
        subject, settings, model_flops=1.0, rounds=2, memory_limit_bytes=None, report=lambda text: None
    )
    assert (plain.result, plain.note, plain.step_s) == ("OOM", "CUDA out of memory, in fragments", None)
    assert reference == full.name == "full uniform 1"
    assert full.step_s is not None
    assert lean.slowdown is not None


QUICKEST = ["bench", "--size", "tiny", "--num-layers", "1", "--seq-length", "8", "--device", "cpu"]


def take(step_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each step take so many seconds."""
    row = Row(name="none", fields={}, peak_bytes=1000, step_s=step_s, model_flops=1e9, num_tokens=8)

    def measured(*_: Any, **__: Any) -> tuple[tuple[Row, ...], str, int]:
        return (row,), "none", 1

    monkeypatch.setattr(bench, "measure", measured)


@pytest.mark.parametrize(
    ("step_s", "status", "result"), [(1.0, 0, "ok"), (1.02, 0, "ok"), (1.2, 1, "perf regression"), (0.5, 0, "faster")]
)
def test_a_setting_that_got_slower_ends_with_1(
    step_s: float,
    status: int,
    result: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    golden = tmp_path / "golden.json"
    take(1.0, monkeypatch)
    assert main([*QUICKEST, "--save-golden", str(golden)]) == 0
    capsys.readouterr()
    take(step_s, monkeypatch)
    assert main([*QUICKEST, "--golden", str(golden), "--threshold", "0.05"]) == status
    assert result in capsys.readouterr().out
