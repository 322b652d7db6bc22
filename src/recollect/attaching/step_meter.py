"""Measures the peak of whole steps, compares it with the prediction, and reports whether the budget held.

A step under a plan is timed as a whole, too, and so is what the tape runs again in its backward: both while they run anyway.
What is left is the step without recompute. The tape's bookkeeping in forward cannot be told from the ops; it counts as
predicted. Times correct the prices that a plan was made by.
"""

import statistics
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Final, NamedTuple

import torch

from recollect._torch_private import is_capturing, profiler_is_active
from recollect.attaching.held import StepUnderWay
from recollect.attaching.planned_step import PlannedStep
from recollect.attaching.timed_steps import Timed
from recollect.byte_format import format_bytes
from recollect.measuring.meter import peak_on_cpu
from recollect.measuring.stopwatch import Stopwatch
from recollect.profile.profile import Profile
from recollect.simulation.clocks import has_two_clocks
from recollect.simulation.decisions import decide
from recollect.simulation.simulate import simulate

# In its first steps the tape compares content, and learns which modules to watch.
_UNSETTLED: Final = 3
_NUM_TIMED: Final = 5
# Of shorter steps noise is a large part, and nobody waits for them.
_SHORT_S: Final = 0.02


class StepClock:
    """Times a few steps under each plan.

    `place` has a watch count what the plan in place runs again, or none.
    """

    def __init__(self, device: torch.device, place: Callable[[Stopwatch | None], None]) -> None:
        self._device, self._place = device, place
        self._planned: PlannedStep | None = None

    def begin(self, planned: PlannedStep) -> None:
        """Begin to time a step, before its first call."""
        timing = planned.timing
        timing.num_steps += 1
        if timing.found is not None or timing.num_steps <= _UNSETTLED or len(timing.watches) == _NUM_TIMED:
            return
        if not planned.is_timeable or profiler_is_active() or is_capturing():
            return
        self._planned, self._thread = planned, threading.get_ident()
        whole, reruns = Stopwatch(self._device), Stopwatch(self._device)
        timing.watches.append((whole, reruns))
        self._place(reruns)
        whole.start()

    def end(self, step: StepUnderWay, planned: PlannedStep | None) -> Timed | None:
        """End a step, and the timing of it; it counts if it was all that the plan in place foresees.

        Return what was found of that plan, once: when enough steps were timed, and the device has come to their end.
        """
        if self._planned is not None:
            watches = self._planned.timing.watches
            watches[-1][0].stop()
            is_whole = planned is self._planned and step.departure is None and len(step.calls) == len(planned.calls)
            if is_whole and self._thread == threading.get_ident():
                self._let_go()
            else:
                self.abandon()
        if planned is None or planned.timing.found is not None or len(planned.timing.watches) < _NUM_TIMED:
            return None
        pairs = [(whole.read(), reruns.read()) for whole, reruns in planned.timing.watches]
        read = [(whole, reruns) for whole, reruns in pairs if whole is not None and reruns is not None]
        if len(read) < len(pairs):
            return None
        planned.timing.watches.clear()
        planned.timing.found = Timed(
            len(read),
            statistics.median(whole.device_s for whole, _ in read),
            statistics.median(reruns.host_s for _, reruns in read),
            statistics.median(reruns.device_s for _, reruns in read),
            0.0 if has_two_clocks(planned.profile) else _tape_s(planned),
        )
        return planned.timing.found

    def abandon(self) -> None:
        if self._planned is not None:
            self._planned.timing.watches.pop()
            self._let_go()

    def _let_go(self) -> None:
        self._place(None)
        self._planned = None


def _tape_s(planned: PlannedStep) -> float:
    simulation = simulate(planned.profile, decide(planned.profile, planned.plan))
    return simulation.recompute_s - simulation.rerun_s


def corrected(planned: PlannedStep, timed: Timed) -> Profile | None:
    """Return the profile with prices by which the plan's slowdown would have been predicted; None if it was not too low.

    It is too low if more was measured than its range allows. One that is too high may be so because of what else
    the loop does within a step.
    """
    plan, profile = planned.plan, planned.profile
    if plan.slowdown_error is None or profile.host is None or timed.step_s < _SHORT_S:
        return None
    if timed.slowdown <= (plan.predicted_slowdown or 0.0) + plan.slowdown_error:
        return None
    simulation = simulate(profile, decide(profile, plan))
    around_s = timed.rerun_host_s
    if not has_two_clocks(profile):  # The ops themselves are as fast or slow as the rest of the step.
        speed = (timed.step_s - timed.rerun_s - timed.tape_s) / profile.step_s
        around_s = around_s / speed - (simulation.rerun_s - simulation.recomputed_ops * profile.host.again_op_s)
    again_op_s = around_s / max(1, simulation.recomputed_ops)
    if again_op_s <= profile.host.again_op_s:
        return None
    graphs = tuple(replace(graph, again_op_s=again_op_s) for graph in profile.graphs)
    return replace(profile, graphs=graphs, host=replace(profile.host, again_op_s=again_op_s))


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

    def begin(self, planned: PlannedStep, number: int) -> None:
        self._planned = planned
        self._is_compiling = planned.plan.is_compiled and planned.num_calls <= 1
        if self._is_cuda:
            self._begin_bytes = torch.cuda.memory_allocated(self._device)
            if not planned.measured_bytes:
                self.restart()
            self._before_bytes = torch.cuda.max_memory_allocated(self._device)
        elif self._on_cpu and (not planned.measured_bytes or number % _MEASURED_EVERY == 0):
            # A profiler holds the trace; a later step will be measured.
            self._found = [] if profiler_is_active() else self._trace.enter_context(peak_on_cpu())

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
