"""Training within a budget: the peak holds, losses do not change by a bit, nor in a run that is killed and resumed."""

import dataclasses
import io
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import recollect
from recollect.errors import BudgetTooSmallError, CheckpointError, PlanFormatError, QuantityError
from recollect.lab.train import sharded_checkpoint
from recollect.lab.train.checkpoint import list_checkpoints
from recollect.lab.train.config import demo_config
from recollect.lab.train.files import remove
from recollect.lab.train.loop import train
from recollect.lab.train.records import Outcome
from recollect.lab.train.session import open_session
from recollect.plans.plan import Plan
from training_runs import config, kill_after, losses, run, start, start_python, wait_for_steps, write_text

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


# Files of a run's folder, what is in them, and what is said of that.
DAMAGED = {
    "plan.json": ("{", PlanFormatError, r"plan\.json: line 1, column 2: not JSON"),
    "baseline.json": (
        "[]",
        CheckpointError,
        r"baseline\.json: expected a JSON object with predicted_peak_bytes, .* Remove it",
    ),
    "config.json": (
        "{",
        CheckpointError,
        r"config\.json: cannot be read as JSON \(.*\)\. Begin again with a different",
    ),
}


def test_a_damaged_file_of_the_run_folder_is_named(tmp_path: Path) -> None:
    run(tmp_path, memory_budget="80%", **SIZE)
    for name, (text, kind, message) in DAMAGED.items():
        path = tmp_path / "run" / name
        whole = path.read_text()
        path.write_text(text)
        with pytest.raises(kind, match=message):
            run(tmp_path, memory_budget="80%", resume=True, **SIZE)
        path.write_text(whole)


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


STEPS = 40


def arguments(folder: Path, run_dir: Path, *more: object) -> list[object]:
    return [
        *("train", "--size", "tiny", "--data", folder / "text.txt", "--seq-length", 32, "--batch-size", 4),
        *("--accumulation", 2, "--steps", STEPS, "--checkpoint-every", 7, "--validate-every", 10),
        *("--validation-batches", 2, "--device", "cpu", "--run-dir", run_dir, *more),
    ]


@pytest.mark.long
def test_killed_again_and_again_the_losses_are_the_same_to_the_bit(tmp_path: Path) -> None:
    write_text(tmp_path)
    whole = start(*arguments(tmp_path, tmp_path / "whole"))
    whole.communicate()
    assert whole.returncode == 0

    run_dir = tmp_path / "killed"
    kill_after(4, run_dir, *arguments(tmp_path, run_dir))  # before the first checkpoint
    assert not list_checkpoints(run_dir / "checkpoints")
    kill_after(9, run_dir, *arguments(tmp_path, run_dir, "--resume"))  # between checkpoints
    kill_after(22, run_dir, *arguments(tmp_path, run_dir, "--resume"))  # while or right after one is written
    last = start(*arguments(tmp_path, run_dir, "--resume"))
    output, errors = last.communicate()
    assert last.returncode == 0, errors
    assert "resuming after step" in output
    assert losses(run_dir) == losses(tmp_path / "whole")
    assert list(losses(run_dir)) == list(range(1, STEPS + 1))


def test_interrupt_ends_after_the_step_with_a_checkpoint(tmp_path: Path) -> None:
    write_text(tmp_path)
    run_dir = tmp_path / "run"
    process = start_python(*arguments(tmp_path, run_dir))
    wait_for_steps(process, run_dir, 3)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    last_step = max(losses(run_dir))
    assert 3 <= last_step < STEPS
    assert f"Stopped after step {last_step}; resume with" in output
    assert list_checkpoints(run_dir / "checkpoints")[-1].name == f"step_{last_step:08d}"


def test_another_environment_is_warned_of(tmp_path: Path) -> None:
    run(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with pytest.warns(UserWarning, match=rf"CPU threads {threads} -> {threads + 1}\); losses may differ"):
            open_session(config(tmp_path, resume=True))
    finally:
        torch.set_num_threads(threads)
    open_session(config(tmp_path, resume=True))


def test_resume_refuses_other_data(tmp_path: Path) -> None:
    run(tmp_path)
    (tmp_path / "text.txt").write_text("something else " * 1000)
    with pytest.raises(CheckpointError, match=r"data\.fingerprint = '\w+', this run has '\w+'"):
        run(tmp_path, resume=True)


def resumed(folder: Path, **changes: Any) -> tuple[Outcome, str]:
    console = Console(record=True, quiet=False, file=io.StringIO(), width=400)
    return train(config(folder, resume=True, **changes), console=console), console.export_text()


def test_resumed_run_takes_another_budget_without_changing_a_bit(tmp_path: Path) -> None:
    size = {"seq_length": 64, "checkpoint_every": 3, "deterministic": True}
    run(tmp_path, run_dir=tmp_path / "whole", steps=8, memory_budget="90%", **size)
    run_dir = tmp_path / "run"
    shutil.copytree(tmp_path / "whole", run_dir)
    remove(run_dir / "checkpoints" / "step_00000008")
    first = Plan.load(run_dir / "plan.json")
    outcome, said = resumed(tmp_path, steps=8, memory_budget="80%", **size)
    assert "resuming after step 6 with memory_budget 80% (before: 90%)" in said
    assert [record.step for record in outcome.records] == [7, 8]
    assert outcome.budget_bytes is not None and outcome.budget_bytes < (first.budget_bytes or 0)
    assert Plan.load(run_dir / "plan.json").budget_bytes == outcome.budget_bytes
    assert losses(run_dir) == losses(tmp_path / "whole")
    outcome, said = resumed(tmp_path, steps=9, memory_budget="80%", host_budget="1GiB", **size)
    assert "resuming after step 8 with steps 9 (before: 8), host_budget 1GiB (before: 0)" in said
    assert Plan.load(run_dir / "plan.json").host_budget_bytes == 1 << 30
    outcome, said = resumed(tmp_path, steps=10, **size)
    assert "resuming after step 9 with steps 10 (before: 9), memory_budget None (before: 80%), host_budget 0" in said
    assert outcome.budget_bytes is None and not (run_dir / "plan.json").exists()


def test_resumed_run_takes_more_steps_and_refuses_fewer(tmp_path: Path) -> None:
    run(tmp_path)
    outcome, said = resumed(tmp_path, steps=8)
    assert "resuming after step 6 with steps 8 (before: 6)" in said
    assert [record.step for record in outcome.records] == [7, 8]
    with pytest.raises(
        CheckpointError, match=r"was written after step 8, this run has 7 steps, expected at least as many"
    ):
        run(tmp_path, resume=True, steps=7)


def test_second_run_in_a_folder_is_refused_and_named_after_the_first(tmp_path: Path) -> None:
    write_text(tmp_path)
    run_dir = tmp_path / "run"
    first = start(*arguments(tmp_path, run_dir))
    wait_for_steps(first, run_dir, 2)
    first.send_signal(signal.SIGSTOP)  # so that it is still there
    try:
        for more in ((), ("--resume",)):
            second = start(*arguments(tmp_path, run_dir, *more))
            _, errors = second.communicate()
            assert second.returncode == 2
            expected = f"Error: run folder {run_dir}: process {first.pid} on "
            assert errors.startswith(expected) and "choose a different --run-dir" in errors
    finally:
        first.send_signal(signal.SIGCONT)
    _, errors = first.communicate()
    assert first.returncode == 0, errors
    assert list(losses(run_dir)) == list(range(1, STEPS + 1))
    assert not (run_dir / "train.pid").exists()


def test_lock_of_a_process_that_was_killed_is_free(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "train.pid").write_text("process 1 on here")
    run(tmp_path)


def test_run_folders_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"run: got --resume but it holds no run, expected the --run-dir of an"):
        run(tmp_path, resume=True)
    run(tmp_path)
    with pytest.raises(CheckpointError, match=r"run: already holds a run \(1 checkpoints\), expected a new or empty"):
        run(tmp_path)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"file/run: cannot be written .* Choose a different --run-dir"):
        run(tmp_path, run_dir=tmp_path / "file" / "run")


def test_unwritable_folder(tmp_path: Path) -> None:
    session = open_session(config(tmp_path))
    (tmp_path / "run" / "checkpoints").write_text("a file in the way")
    with pytest.raises(CheckpointError) as caught:
        session.save()
    assert str(caught.value) == (
        f"checkpoint {tmp_path}/run/checkpoints/step_00000000: cannot be written (Not a directory), expected a writable folder "
        "with free space. Older checkpoints are kept; free space or choose a different --run-dir."
    )


def test_an_interrupt_while_one_is_written_is_no_error_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path) -> int:
        raise KeyboardInterrupt

    session = open_session(config(tmp_path))
    monkeypatch.setattr(sharded_checkpoint, "checksum_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.save()
    assert not list_checkpoints(tmp_path / "run" / "checkpoints")
