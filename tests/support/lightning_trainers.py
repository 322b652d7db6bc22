"""Lightning's `Trainer` on tiny random models, to be run with a memory budget."""

import logging
import tempfile
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from hugging_face_trainers import llama, texts
from metered_trainers import NUM_STEPS, Case, StepPeaks
from recollect.integrations.lightning import MemoryBudget


class Automatic(pl.LightningModule):
    """Lightning calls backward and the optimizer, which is the default."""

    num_layers = 2

    def __init__(self) -> None:
        super().__init__()
        self.model = llama(num_hidden_layers=self.num_layers)

    def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
        return self.model(**batch).loss

    def validation_step(self, batch: dict[str, torch.Tensor], number: int) -> None:
        self.log("loss", self.model(**batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Manual(Automatic):
    """The module calls backward and the optimizer, every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, torch.Tensor], number: int) -> None:
        self.manual_backward(self.model(**batch).loss / 2)
        if number % 2:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


class Watching(pl.Callback):
    """Has the peak of each step read."""

    def __init__(self, peaks: StepPeaks) -> None:
        self.peaks = peaks
        self.num_steps = 0

    def on_train_start(self, *_: Any) -> None:
        self.peaks.begin()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step > self.num_steps:
            self.num_steps = trainer.global_step
            self.peaks.end()


def trainer(folder: str, *callbacks: Any, **changes: Any) -> pl.Trainer:
    """A trainer on the CPU that says nothing."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
    }
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "limit_val_batches": 0, **quiet, **changes}
    return pl.Trainer(default_root_dir=folder, callbacks=[*callbacks], **options)


def loader(steps: int) -> DataLoader[Any]:
    return DataLoader(texts(8 * steps), batch_size=4)


def case(
    build: Callable[[], Automatic],
    steps: int = NUM_STEPS,
    result: Callable[[Automatic], nn.Module] = lambda module: module,
    strategy: Callable[[], Any] = lambda: "auto",
    **options: Any,
) -> Case:
    """Train with options of a trainer, and a strategy of its own; `result` returns the model of a trained module."""

    def run(budget: int | str | None, peaks: StepPeaks) -> tuple[nn.Module, int]:
        module = build()
        callbacks = [] if budget is None else [MemoryBudget(budget)]
        with tempfile.TemporaryDirectory() as folder:
            runs = trainer(folder, *callbacks, Watching(peaks), strategy=strategy(), **options)
            runs.fit(module, loader(steps))
        return result(module), len(callbacks[0].attached.recorded_steps) if callbacks else 0

    return run


CASES: dict[str, Case] = {
    "automatic": case(Automatic, accumulate_grad_batches=2),
    "automatic in bf16": case(Automatic, accumulate_grad_batches=2, precision="bf16-mixed"),
    "manual": case(Manual),
}
