"""Training within a budget: the peak holds, the losses do not change by a bit, and the plan stays with the run."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import recollect
from recollect.errors import BudgetTooSmallError, CheckpointError, PlanFormatError, QuantityError
from recollect.lab.train.config import demo_config
from training_runs import losses, run

# Activations must outweigh the state for a budget to bite: long sequences, a narrow model.
SIZE: dict[str, Any] = {"seq_length": 128, "batch_size": 8, "num_layers": 4, "validate_every": 0}


@pytest.mark.parametrize(("accumulation", "precision"), [(1, "bf16"), (2, "fp32")])
def test_budget_holds_and_the_losses_are_those_without_it(tmp_path: Path, accumulation: int, precision: str) -> None:
    settings = {**SIZE, "accumulation": accumulation, "precision": precision}
    plain = run(tmp_path, run_dir=tmp_path / "plain", **settings)
    budget_bytes = plain.measured_peak_bytes * 7 // 10
    lean = run(tmp_path, run_dir=tmp_path / "lean", memory_budget=str(budget_bytes), **settings)
    assert losses(tmp_path / "lean") == losses(tmp_path / "plain")
    assert [r.grad_norm for r in lean.records] == [r.grad_norm for r in plain.records]
    assert lean.measured_peak_bytes <= budget_bytes < plain.measured_peak_bytes
    # 0.2 % seen in fp32; 3.3 % too high seen in bf16, on a step of 19 MiB with its 0.5 MiB of logits.
    tolerance = 0.01 if precision == "fp32" else 0.05
    assert lean.predicted_peak_bytes == pytest.approx(lean.measured_peak_bytes, rel=tolerance)
    assert lean.baseline.predicted_peak_bytes == pytest.approx(plain.measured_peak_bytes, rel=tolerance)


def test_plain_step_is_measured_on_request(tmp_path: Path) -> None:
    outcome = run(tmp_path, measure_plain=True, memory_budget="80%", **SIZE)
    assert outcome.baseline.measured_peak_bytes == pytest.approx(outcome.baseline.predicted_peak_bytes, rel=0.01)
    assert outcome.baseline.measured_step_s is not None
    again = run(tmp_path, resume=True, measure_plain=True, memory_budget="80%", **SIZE)
    assert again.baseline == outcome.baseline
    assert again.predicted_peak_bytes == outcome.predicted_peak_bytes


def test_budgets_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(BudgetTooSmallError, match=r"1\.0 MiB .* is below the least possible peak"):
        run(tmp_path, memory_budget="1MiB", **SIZE)
    with pytest.raises(QuantityError, match="'much': "):
        run(tmp_path, memory_budget="much", **SIZE)  # the folder of a run that never began can be used again
    with pytest.raises(QuantityError, match="'60': has no unit; write '60%'"):
        run(tmp_path, memory_budget="60", data=(tmp_path / "none.txt",), run_dir=tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("name", "text", "kind", "message"),
    [
        ("plan.json", "{", PlanFormatError, r"plan\.json: line 1, column 2: not JSON"),
        (
            "baseline.json",
            "[]",
            CheckpointError,
            r"baseline\.json: expected a JSON object with predicted_peak_bytes, .* Remove it",
        ),
        (
            "config.json",
            "{",
            CheckpointError,
            r"config\.json: cannot be read as JSON \(.*\)\. Begin again with a different",
        ),
    ],
)
def test_a_damaged_file_of_the_run_folder_is_named(
    name: str, text: str, kind: type[Exception], message: str, tmp_path: Path
) -> None:
    run(tmp_path, memory_budget="80%", **SIZE)
    (tmp_path / "run" / name).write_text(text)
    with pytest.raises(kind, match=message):
        run(tmp_path, memory_budget="80%", resume=True, **SIZE)


def test_demo_settings_hold_what_they_promise() -> None:
    demo = demo_config()
    assert demo.run.measure_plain
    from recollect.cli.commands import RecordedStep
    from recollect.cli.common import step_recorder

    flags = RecordedStep(model=demo.model, batch_size=demo.optim.batch_size, seq_length=demo.data.seq_length, fake=True)
    profile = step_recorder(flags)(1)
    assert demo.step.memory_budget is not None
    plan = recollect.plan(profile, demo.step.memory_budget)
    plain = recollect.classic_plan(profile, "keep_all")
    assert plain.predicted_peak_bytes > 1.9 * plan.budget_bytes
    baseline = json.dumps(dataclasses.asdict(demo), default=str)
    assert '"device": "cpu"' in baseline
