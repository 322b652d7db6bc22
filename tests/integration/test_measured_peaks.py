"""What was held, measured: in the report, in lines, and in what trainers log."""

import csv
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import recollect
from recollect.attaching.attached import Attached
from recollect.attaching.step_meter import StepMeter
from recollect.byte_format import format_bytes
from recollect.errors import BudgetTooSmallError, BudgetWarning
from recollect.integrations.deepspeed.section import BudgetSection
from small_llama import llama_step

# Added to what is predicted, for what no recording sees: `_UNSEEN_BYTES`.
_UNSEEN_BYTES = 1024


class Loop:
    """A plain loop with a handle."""

    def __init__(self, **options: Any) -> None:
        self.model, _ = llama_step(num_layers=3, hidden_size=64, num_attention_heads=4)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.lines: list[str] = []
        self.attached = recollect.attach(self.model, self.optimizer, "80%", log=self.lines.append, **options)

    def run(self, num_steps: int) -> Attached:
        for _ in range(num_steps):
            tokens = torch.randint(0, 64, (4, 64))
            self.model(tokens=tokens, labels=tokens).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self.attached


def test_the_first_step_under_a_plan_is_measured_and_said_to_be_held() -> None:
    loop = Loop(measure=True)
    report = loop.run(1).report()
    assert "predicted peak" in report and "not measured, which on a CPU measure=True asks for" in report
    attached = loop.run(3)
    (step,) = attached.planned
    assert 0 <= step.peak_bytes - step.measured_bytes <= _UNSEEN_BYTES
    assert ": held" in attached.report().splitlines()[1] and "measured peak" in attached.report()
    assert ": kept values of decoder.layers.* " in attached.report(), "what fills the peak is named"
    planned, measured = loop.lines
    assert ", predicted peak " in planned and "measured" not in planned
    assert ", measured peak " in measured and measured.endswith(": held, for 4 x 64")
    numbers = attached.numbers
    assert numbers["measured_peak_bytes"] == step.measured_bytes <= numbers["memory_budget_bytes"]
    assert numbers["over_budget_bytes"] == 0


def test_weights_and_state_count_wherever_they_come_from() -> None:
    loop = Loop(measure=True)
    loop.run(1)
    stored = io.BytesIO()
    torch.save(loop.optimizer.state_dict(), stored)
    stored.seek(0)
    loop.optimizer.load_state_dict(torch.load(stored))
    for parameter in loop.model.parameters():
        parameter.detach().numpy()
    (step,) = loop.run(1).planned
    assert 0 <= step.peak_bytes - step.measured_bytes <= _UNSEEN_BYTES


def test_a_budget_that_did_not_hold_is_said_by_how_much() -> None:
    loop = Loop(measure=True)
    loop.run(1)
    beside = torch.ones(1 << 17)
    with pytest.warns(BudgetWarning, match="the process held .* at its peak, .* more than was planned for"):
        attached = loop.run(1)
    (step,) = attached.planned
    over_bytes = step.measured_bytes - step.budget_bytes
    assert 0 < over_bytes <= beside.nbytes
    assert loop.lines[1].endswith(f"over the budget by {format_bytes(over_bytes)}, for 4 x 64")
    assert attached.numbers["over_budget_bytes"] == over_bytes
    loop.run(1)
    assert attached.recorded_steps == [0, 2], "the next step is planned with what is there besides"


def test_nothing_is_measured_on_a_cpu_unasked_nor_beside_a_profiler() -> None:
    unasked = Loop()
    assert "measured_peak_bytes" not in unasked.run(3).numbers and len(unasked.lines) == 1
    (step,) = unasked.attached.planned
    meter = StepMeter(torch.device("cpu"), on_cpu=True, log=unasked.lines.append)
    with profile(activities=[ProfilerActivity.CPU]):
        meter.begin(step, 1)
    assert not meter.end([step]) and not step.measured_bytes
    meter.begin(step, 2)
    meter.end([step])
    assert step.measured_bytes


def test_a_step_that_fails_is_not_measured() -> None:
    loop = Loop(measure=True)
    loop.run(1)
    tokens = torch.randint(0, 64, (4, 64))
    loss = loop.model(tokens=tokens, labels=tokens).loss
    loop.attached.remove()
    loss.backward()
    assert not loop.attached.planned[0].measured_bytes
    recollect.measure_peak(lambda: None, device="cpu")  # The trace has ended.


def read_tensorboard(folder: Path, name: str) -> list[float]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="needs it")
    found: list[float] = []
    for path in sorted({path.parent for path in folder.rglob("events.out.tfevents.*")}):
        events = accumulator.EventAccumulator(str(path)).Reload()
        if name in events.Tags()["scalars"]:
            found += [event.value for event in events.Scalars(name)]
    return found


def test_hugging_faces_trainer_logs_what_was_measured_wherever_it_reports_to(tmp_path: Path) -> None:
    for package in ("accelerate", "tensorboard"):
        pytest.importorskip(package, reason=f"needs {package}")
    from transformers import Trainer  # noqa: PLC0415, only with accelerate

    from hugging_face_trainers import arguments, llama, texts  # noqa: PLC0415
    from recollect.integrations.transformers import MemoryBudget  # noqa: PLC0415

    changes: dict[str, Any] = {
        "max_steps": 3,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "report_to": ["tensorboard"],
    }
    args = arguments(str(tmp_path), log_level="error", dataloader_pin_memory=False, **changes)
    budget = MemoryBudget("75%", measure=True)
    trainer = Trainer(llama(), args, train_dataset=texts(), callbacks=[budget])
    trainer.train()
    assert budget.attached is not None
    (step,) = budget.attached.planned
    history = trainer.state.log_history
    assert [row["measured_peak_bytes"] for row in history if "measured_peak_bytes" in row] == [step.measured_bytes]
    assert [row["step"] for row in history if "loss" in row] == [1, 2, 3], "nothing of the trainer's own is lost"
    assert read_tensorboard(tmp_path, "train/measured_peak_bytes") == [pytest.approx(step.measured_bytes)]
    assert len(read_tensorboard(tmp_path, "train/predicted_peak_bytes")) == 2


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")
def test_lightning_logs_what_was_measured_to_its_loggers(tmp_path: Path) -> None:
    loggers = pytest.importorskip("lightning.pytorch.loggers", reason="needs lightning")
    from lightning_trainers import Automatic, loader, trainer  # noqa: PLC0415
    from recollect.integrations.lightning import MemoryBudget  # noqa: PLC0415

    budget = MemoryBudget("75%", measure=True)
    runs = trainer(str(tmp_path), budget, max_epochs=2, logger=[loggers.CSVLogger(tmp_path)], log_every_n_steps=1)
    runs.fit(Automatic(), loader(3), loader(1))
    measured_bytes = budget.attached.planned[-1].measured_bytes
    (log,) = tmp_path.rglob("metrics.csv")
    with log.open() as file:
        rows = [row["measured_peak_bytes"] for row in csv.DictReader(file)]
    assert int(float([row for row in rows if row][-1])) == measured_bytes


def test_deepspeeds_section_asks_for_it() -> None:
    section = BudgetSection.of({"recollect": {"memory_budget": "22GiB", "measure": True}})
    assert section.measure and section.with_arguments(None, "warn", None).measure


def test_a_budget_that_is_too_small_says_what_fills_the_least_peak() -> None:
    loop = Loop()
    loop.attached.remove()
    loop.attached = recollect.attach(loop.model, loop.optimizer, "1KiB")
    with pytest.raises(
        BudgetTooSmallError, match=r"needs\. It is filled by .*optimizer state .*, parameters "
    ) as caught:
        loop.run(1)
    assert sum("decoder.layers" in tenant for tenant in caught.value.tenants) >= 1
