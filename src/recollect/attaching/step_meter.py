"""Measures the peak of whole steps, compares it with the prediction, and reports whether the budget held."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Final, NamedTuple

import torch

from recollect._torch_memory import some_profiler_is_active
from recollect.attaching.planned_step import PlannedStep
from recollect.byte_format import format_bytes
from recollect.measuring.meter import peak_on_cpu

# On the CPU, where the meter slows a step down: the first step under each plan, and then one in this many.
_MEASURED_EVERY: Final = 100


class Excess(NamedTuple):
    """The message about a measured peak above what was planned for, and the bytes that later steps need; None if unknown."""

    text: str
    more_bytes: int | None


class StepMeter:
    """Measures steps that run under a plan.

    CUDA counts all the time; its counter is reset at the first step under each plan, and when a step was recorded, which
    resets it, too. On the CPU a trace of the allocator is added up.
    """

    def __init__(self, device: torch.device, *, on_cpu: bool, log: Callable[[str], object]) -> None:
        self._device, self._log = device, log
        self._is_cuda, self._on_cpu = device.type == "cuda", on_cpu and device.type == "cpu"
        self._planned: PlannedStep | None = None
        self._trace = ExitStack()
        self._found: list[int] = []
        self.peak_bytes = self._before_bytes = self._seen_bytes = self._begin_bytes = 0
        self._is_compiling = False

    def restart(self) -> None:
        """Reset the count on CUDA: memory used to time units is not a step's peak."""
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats(self._device)

    def begin(self, planned: PlannedStep, number: int, known: Callable[[], Iterable[torch.Tensor]] = tuple) -> None:
        """Begin to measure a step, if it is its turn; `known`: returns tensors that count wherever they come from."""
        self._planned = planned
        self._is_compiling = planned.plan.is_compiled and planned.num_calls <= 1
        if self._is_cuda:
            self._begin_bytes = torch.cuda.memory_allocated(self._device)
            if not planned.measured_bytes:
                self.restart()
            self._before_bytes = torch.cuda.max_memory_allocated(self._device)
        elif self._on_cpu and (not planned.measured_bytes or number % _MEASURED_EVERY == 0):
            # A profiler holds the trace; a later step will be measured.
            self._found = [] if some_profiler_is_active() else self._trace.enter_context(peak_on_cpu(known()))

    def end(self, steps: Sequence[PlannedStep]) -> Excess | None:
        """End the measurement of a step, and note it; return how much more was held than planned and before, if it was."""
        planned, self._planned = self._planned, None
        self._trace.close()
        self.peak_bytes = 0
        if planned is None:
            return None
        peak_bytes = torch.cuda.max_memory_allocated(self._device) if self._is_cuda else max(self._found, default=0)
        self._begin_bytes = self._begin_bytes if self._is_cuda else min(self._found, default=0)
        self._found = []
        # CUDA's count from before the step belongs to a different step.
        if peak_bytes > self._before_bytes or peak_bytes <= planned.budget_bytes:
            self.peak_bytes = peak_bytes
        if peak_bytes > max(self._before_bytes, planned.measured_bytes) and not self._is_compiling:
            is_new = not planned.measured_bytes or planned.measured_bytes <= planned.budget_bytes < peak_bytes
            planned.measured_bytes = peak_bytes
            if is_new:
                self._log(planned.measured_line())
        return self._excess(peak_bytes, planned, steps)

    def abandon(self) -> None:
        self._planned, self._found = None, []
        self._trace.close()

    def _excess(self, peak_bytes: int, planned: PlannedStep, steps: Sequence[PlannedStep]) -> Excess | None:
        # Of any step, since CUDA's peak stays; and above the budget, since blocks may be slightly larger than predicted.
        expected_bytes = max((max(step.budget_bytes, step.peak_bytes) for step in steps), default=peak_bytes)
        if peak_bytes <= max(expected_bytes, self._seen_bytes):
            return None
        more_bytes = peak_bytes - expected_bytes
        text = f"{'the device' if self._is_cuda else 'the process'} held {format_bytes(peak_bytes)} at its peak, "
        text += f"{format_bytes(more_bytes)} more than was planned for: "
        if self._is_compiling:
            return Excess(f"{text}PyTorch compiled layers for a new plan, which needs memory once", 0)
        self._seen_bytes = peak_bytes
        if self.peak_bytes and 2 * (self._begin_bytes - planned.begin_bytes) < more_bytes:
            compiled, other = "compiled layers use buffers that no prediction knows", "its shapes may depend on data"
            text += compiled if planned.plan.is_compiled else f"{other}, as its calls are like the recorded ones"
            return Excess(f"{text}. Steps like it are planned again, with room for that", more_bytes)
        text += "something besides the recorded step needs memory (evaluation, generation, another model). "
        return Excess(f"{text}The next step will be recorded and planned again", None)
