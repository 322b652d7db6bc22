"""The training loop: it learns, it counts, it says what it did, and biases of routers move once a step."""

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from recollect.cli.train import report_lines, report_table
from recollect.errors import CheckpointError
from recollect.lab.models.gpt import GPTModel
from recollect.lab.models.sizes import NAMED_CONFIGS
from recollect.lab.train.config import RunFlags
from recollect.lab.train.exchange import Exchange
from recollect.lab.train.loop import train
from recollect.lab.train.model_flags import ModelFlags
from recollect.lab.train.optim_flags import OptimFlags
from recollect.lab.train.optimizer_step import measure_step, resident_bytes
from recollect.lab.train.processes import ONE_PROCESS
from recollect.lab.train.records import Baseline, LiveDisplay, MetricsFile, Outcome, PlainDisplay, StepRecord
from recollect.lab.train.session import open_session
from recollect.lab.train.trained import Trained, build_trained
from training_runs import config, losses, run


def built(folder: Path) -> GPTModel:
    """Return the model of a tiny run before its first step."""
    flags = config(folder)
    return build_trained(flags.model.dimensions(256), flags, ONE_PROCESS).model


def step(model: GPTModel, optimizer: torch.optim.Optimizer, batches: Any, clip_norm: float) -> tuple[float, float]:
    return Trained(model, model, optimizer, Exchange()).step(batches, clip_norm=clip_norm)


def test_it_learns_and_validates(tmp_path: Path) -> None:
    outcome = run(tmp_path, steps=60, learning_rate=3e-3, validate_every=30)
    first, last = outcome.records[0], outcome.records[-1]
    assert first.loss == pytest.approx(math.log(256), abs=0.1)
    assert last.loss < 2.5  # eight words spelled out of 15 letters; 60 steps reach about 2.1
    validations = {r.step: r.validation_loss for r in outcome.records if r.validation_loss is not None}
    assert list(validations) == [30, 60]
    assert validations[60] < validations[30]


def test_clipping_bounds_the_norm(tmp_path: Path) -> None:
    model = built(tmp_path)
    start = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    tokens = torch.randint(256, (2, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    _, norm = step(model, optimizer, [(tokens, tokens)], 0.1)
    moved = torch.cat([p.detach().flatten() for p in model.parameters()]) - start
    assert norm > 0.1
    assert moved.norm().item() == pytest.approx(0.1, rel=1e-3)


def test_peak_of_a_step_counts_all_that_is_alive(tmp_path: Path) -> None:
    session = open_session(config(tmp_path))

    def session_step() -> tuple[float, float]:
        return session.trained.step(list(session.batches(0)), clip_norm=1.0)

    session_step()
    parameter_bytes = 4 * session.model.num_parameters
    num_parameters = len(list(session.model.parameters()))
    # parameters, two moments, and AdamW's step counts of 4 bytes; gradients only once there are some
    assert resident_bytes(session.model, session.optimizer) == 3 * parameter_bytes + 4 * num_parameters
    for parameter in session.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert resident_bytes(session.model, session.optimizer) == 4 * parameter_bytes + 4 * num_parameters
    session.optimizer.zero_grad()
    _, peak_bytes = measure_step(session_step, device=session.device, model=session.model, optimizer=session.optimizer)
    logits_bytes = 4 * 4 * 32 * 256
    assert peak_bytes > 4 * parameter_bytes + logits_bytes


def test_metrics_file_drops_later_steps_and_half_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.5}\n{"step": 2, "loss": 1.25}\n{"step": 3, "lo')
    with pytest.warns(UserWarning, match=r"metrics.jsonl: line 3 is half of one, .* and is removed"):
        log = MetricsFile(path, first_step=1)
    log.write(record(2))
    log.close()
    assert [json.loads(line)["loss"] for line in path.read_text().splitlines()] == [1.5, 0.1 + 0.2]


@pytest.mark.parametrize(
    "damage",
    [b"garbage\n", b'{"step": 1, "lo\n', b"\xff\xfe\x00\n", b"\n", b'{"loss": 1.5}\n', b"[]\n", b'{"step": 0}\n'],
)
def test_metrics_file_names_the_damaged_line(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    before = b'{"step": 1, "loss": 1.5}\n' + damage + b'{"step": 2, "loss": 1.25}\n'
    path.write_bytes(before)
    with pytest.raises(CheckpointError, match=rf'{path}: line 2 is b.*, expected a JSON object with "step".* Remove'):
        MetricsFile(path, first_step=2)
    assert path.read_bytes() == before


def record(step: int, **changes: Any) -> StepRecord:
    values = {"loss": 0.1 + 0.2, "learning_rate": 1e-3, "grad_norm": 1.0, "step_s": 0.5, "tokens_per_s": 100.0}
    return StepRecord(step=step, **{**values, **changes})


def test_tensorboard_gets_each_number(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run(tmp_path, steps=3, tensorboard=True)
    events = accumulators.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(list(losses(tmp_path / "run").values()))


def test_plain_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    stream = io.StringIO()
    train(config(tmp_path, steps=40), console=Console(file=stream, width=200))
    lines = [line for line in stream.getvalue().splitlines() if line.startswith("step ")]
    assert 20 <= len(lines) <= 23  # every second step, and the measured ones
    assert "validation" in lines[-1]
    assert "peak" in lines[-1]


@pytest.mark.parametrize("kind", [LiveDisplay, PlainDisplay])
def test_displays_show_loss_speed_and_peak_against_budget(kind: type) -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=160, force_terminal=kind is LiveDisplay)
    more = {"first_step": 0} if kind is LiveDisplay else {}
    display = kind(console, total_steps=2, budget_bytes=4 << 20, **more)
    display.note("a note [with brackets]")
    display.write(record(1, peak_bytes=3 << 20))
    display.write(record(2, loss=0.25, validation_loss=0.5, peak_bytes=2 << 20))
    display.close()
    text = stream.getvalue()
    for part in ("a note [with brackets]", "loss 0.2500", "validation 0.5000", "100 tokens/s", "3.0 MiB of 4.0 MiB"):
        assert part in text


def outcome(**changes: Any) -> Outcome:
    values: dict[str, Any] = {
        "records": (record(1, loss=5.0, peak_bytes=90 << 20), record(2, loss=4.0, validation_loss=4.5)),
        "baseline": Baseline(predicted_peak_bytes=200 << 20, measured_peak_bytes=201 << 20, measured_step_s=1.0),
        "budget_bytes": 100 << 20,
        "predicted_peak_bytes": 95 << 20,
        "predicted_slowdown": 0.2,
        "step_s": 1.25,
        "folder": "runs/x",
        "total_steps": 2,
    }
    return Outcome(**{**values, **changes})


def report(result: Outcome) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(report_table(result))
    for line in report_lines(result):
        console.print(line)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_report_sets_planned_predicted_and_measured_side_by_side() -> None:
    text = report(outcome())
    for part in ("200.0 MiB", "201.0 MiB", "100.0 MiB", "95.0 MiB", "90.0 MiB", "+20.0 %", "+25.0 %"):
        assert part in text
    assert "Loss 5.0000 at step 1, 4.0000 at step 2 of 2." in text
    assert "The budget held, with 10.0 MiB to spare." in text


def test_report_leaves_out_what_was_not_measured_and_says_each_loss_once() -> None:
    assert "fastest step without recompute" in report(outcome()) and "fastest step of this run" in report(outcome())
    baseline = Baseline(predicted_peak_bytes=200 << 20, measured_peak_bytes=None, measured_step_s=None)
    assert "fastest step" not in report(outcome(baseline=baseline, step_s=None))
    assert "Validation loss 4.5000 after step 2.\n" in report(outcome())


def test_report_says_when_the_budget_did_not_hold_or_nothing_ran() -> None:
    assert "The budget was EXCEEDED by 10.0 MiB: please report" in report(outcome(budget_bytes=80 << 20))
    assert "by 10.0 MiB: gloo holds." in report(outcome(budget_bytes=80 << 20, excess_reason="gloo holds"))
    assert "The run was complete: all 2 steps had been done before." in report(outcome(records=(), step_s=None))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OptimFlags(steps=0), "steps: got 0, expected at least 1"),
        (lambda: OptimFlags(learning_rate=-1.0), "learning_rate: got -1.0, expected at least 0"),
        (lambda: OptimFlags(min_lr_fraction=2.0), "min_lr_fraction: got 2.0, expected 0 to 1"),
        (lambda: RunFlags(keep_checkpoints=0), "keep_checkpoints: got 0, expected at least 1"),
        (
            lambda: ModelFlags(size="tiny", num_attention_heads=5),
            "TransformerConfig.hidden_size: got 64, expected a multiple of",
        ),
    ],
)
def test_settings_out_of_range(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def token_batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    tokens = torch.randint(256, (2, 17))
    return tokens[:, :-1], tokens[:, 1:]


def test_a_step_updates_biases_once_for_all_its_micro_batches() -> None:
    torch.manual_seed(0)
    model = GPTModel(NAMED_CONFIGS["deepseek-v3-tiny"])
    router = model.decoder.layers[1].mlp.router
    counted = torch.zeros(16, dtype=torch.int64)

    def count(_module: Any, _inputs: Any, routing: Any) -> None:
        counted.add_(routing.statistics.tokens_per_expert)

    router.register_forward_hook(count)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    Trained(model, model, optimizer, Exchange()).step([token_batch(0), token_batch(1)], clip_norm=1.0)
    expected = 0.001 * (counted.float().mean() - counted).sign()
    assert torch.equal(router.expert_bias, expected)
    assert not router.tokens_per_expert.any()


def test_validation_counts_the_next_token_only_and_drops_nothing() -> None:
    torch.manual_seed(0)
    config = NAMED_CONFIGS["deepseek-v3-tiny"].changed(hidden_dropout=0.5)
    model = GPTModel(config)
    trained = Trained(model, model, torch.optim.SGD(model.parameters()), Exchange())
    first = trained.validation_loss([token_batch(0), token_batch(1)])
    assert first == trained.validation_loss([token_batch(0), token_batch(1)])
    assert model.training
    model.eval()
    assert first == pytest.approx(sum(model(*token_batch(seed)).lm_loss.item() for seed in (0, 1)) / 2)
