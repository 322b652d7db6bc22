"""Times whole steps under a plan, and what the tape runs again in their backward: both while they run anyway.

What is left is the step without recompute. The tape's bookkeeping in forward cannot be told from the ops; it counts as
predicted. Times correct the prices that a plan was made by.
"""

import statistics
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch

from recollect._torch_private import is_capturing, profiler_is_active
from recollect.attaching.held import StepUnderWay
from recollect.attaching.planned_step import PlannedStep
from recollect.attaching.timed_steps import Timed
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
