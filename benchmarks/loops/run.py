"""Runs one loop, plain or within a budget, and reads the peak of every step from the meter."""

from __future__ import annotations

import gc
import hashlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import recollect
from allocator_meter import AllocatorMeter
from loops.loop import Batch, Loop

__all__ = ["Ran", "run"]


@dataclass(frozen=True)
class Ran:
    """What a run of a loop showed.

    Attributes:
        peaks_bytes: for each batch, the most bytes alive from the moment it was asked for to the moment the next one was.
        digest: of all parameters and buffers at the end, and of the state of the random generator.
        said: what recollect warned of, each with the number of the batch, from 0; also the error that ended the run.
        error: what recollect raised; None if the run came to its end.
        handle: what `attach` returned; None without recollect.
    """

    peaks_bytes: list[int]
    digest: str
    said: list[tuple[int, str]]
    error: Exception | None
    handle: Any

    def unsaid_overruns(self, budget_bytes: int) -> list[int]:
        """Return the numbers of the batches above the budget before which nothing was said."""
        first_word = min((batch for batch, _ in self.said), default=len(self.peaks_bytes))
        return [n for n, peak in enumerate(self.peaks_bytes) if peak > budget_bytes and n < first_word]

    def overruns(self, budget_bytes: int) -> list[int]:
        """Return the numbers of the batches above the budget."""
        return [n for n, peak in enumerate(self.peaks_bytes) if peak > budget_bytes]

    def silent_overruns(self, budget_bytes: int) -> list[int]:
        """Return the numbers of the batches above the budget of which nothing was said, neither then nor in the next one.

        A step may say so when it ends; one that no plan fits into says so once, before all others like it.
        """
        said = {batch for batch, _ in self.said}
        has_no_plan = min((batch for batch, text in self.said if "no plan fits" in text), default=len(self.peaks_bytes))
        return [n for n in self.overruns(budget_bytes) if not said & {n, n + 1} and n < has_no_plan]


def run(
    loop: Loop, meter: AllocatorMeter, budget_bytes: int | None = None, *, num_batches: int = 0, seed: int = 0
) -> Ran:
    """Train from a seed and return the peaks of all batches.

    Args:
        loop: what to run.
        meter: reads the allocator.
        budget_bytes: what recollect is attached with; None to train without it.
        num_batches: instead of the loop's own.
        seed: of weights and dropout.

    What the loop itself makes counts, from its models on, all of it.
    """
    torch.manual_seed(seed)
    gc.collect()
    # Objects of the libraries are not looked at again: each collection takes 0.3 s else.
    gc.freeze()
    before_bytes = meter.now_bytes()
    peaks_bytes: list[int] = []
    said: list[tuple[int, str]] = []
    handles: list[Any] = []
    error: Exception | None = None
    trained: list[nn.Module] = []
    current = 0

    def batches() -> Iterator[Batch]:
        nonlocal current
        for current in range(num_batches or loop.num_batches):
            # A clear window for each batch: freed cycles of one would otherwise count in the next, at a moment of chance.
            gc.collect()
            meter.restart()
            yield loop.data(current)
            peaks_bytes.append(meter.peak_bytes() - before_bytes)

    def attach(model: Any, optimizer: Any) -> None:
        if budget_bytes is not None:
            handles.append(recollect.attach(model, optimizer, budget_bytes, log=lambda line: None))

    def note(message: Warning | str, category: type[Warning], *_: Any) -> None:
        if category.__module__.startswith("recollect"):
            said.append((current, f"{category.__name__}: {message}"))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note  # type: ignore[assignment]
        try:
            trained = loop.train(batches(), attach)
        except Exception as raised:
            if budget_bytes is None:
                raise
            error = raised
            said.append((current, f"{type(raised).__name__}: {raised}"))
    return Ran(peaks_bytes, _digest(trained), said, error, handles[0] if handles else None)


def _digest(models: list[nn.Module]) -> str:
    found = hashlib.sha256()
    for model in models:
        for name, tensor in model.state_dict().items():
            found.update(name.encode())
            found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    found.update(torch.get_rng_state().numpy().tobytes())
    return found.hexdigest()[:16]
