"""Play a step with two clocks: the host issues ops, and the device runs them, behind it.

    host = host + issue(op)        device = max(device, host) + kernel(op)

While the device always has work, kernels determine the step time; while it waits for the host, Python does. On a CPU there is
one clock: overhead around an op delays the next one.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from recollect.plans.action import EngineChoice
from recollect.profile.events import BACKWARD, FORWARD, WAIT
from recollect.profile.graph import OpRecord, UnitGraph
from recollect.profile.host_times import HostTimes
from recollect.profile.profile import Profile
from recollect.simulation.decisions import CallActions
from recollect.simulation.lifetimes import ClockedPlayback, EveryEvent
from recollect.simulation.simulate import run
from recollect.weak_map import WeakMap

# Ops whose result's shape the host waits for.
_WAITS: Final = ("nonzero", "masked_select", "unique")


class StepTimes(NamedTuple):
    """How long the host and the device work in a step, and how long it takes."""

    host_s: float
    device_s: float
    step_s: float


def has_two_clocks(profile: Profile) -> bool:
    """Whether a device runs the step behind its host, and the host's time is known; not for units inside the compiler."""
    return profile.host is not None and profile.host.has_issue_times and not any(g.variants for g in profile.graphs)


def step_times(profile: Profile, decisions: Sequence[CallActions]) -> StepTimes:
    playback = _TwoClocks(EveryEvent(profile), decisions)
    run(playback)
    playback.repeat()
    return StepTimes(playback.host_s, playback.busy_s, max(playback.host_s, playback.device_s))


_plain = WeakMap[StepTimes]()


def plain_step_times(profile: Profile) -> StepTimes:
    """Return the times of a step without a plan, played once for each profile."""
    found = _plain.get(profile)
    if found is None:
        found = _plain[profile] = step_times(profile, [CallActions()] * len(profile.calls))
    return found


def added_s(profile: Profile, decisions: Sequence[CallActions]) -> float:
    return max(0.0, step_times(profile, decisions).step_s - plain_step_times(profile).step_s)


class _TwoClocks(ClockedPlayback):
    def __init__(self, program: EveryEvent, decisions: Sequence[CallActions]) -> None:
        # Ops rerun in a traced unit are rerun on the tape, too.
        super().__init__(program, [replace(one, engine=EngineChoice.TAPE) for one in decisions])
        self._traced = {call for call, one in enumerate(decisions) if one.engine is EngineChoice.GRAPH}
        self._times = program.profile.host or HostTimes()
        self.host_s = self.device_s = self.busy_s = 0.0
        self._before_s = 0.0, 0.0, 0.0

    def actions(self) -> dict[int, Callable[..., None]]:
        return {**super().actions(), WAIT: self._wait}

    def work(self, op: OpRecord) -> None:
        is_on_tape = self.is_recomputing and self.call not in self._traced
        self._issue(self._times.again_op_s if is_on_tape else self._times.forward_op_s, op.time_s)
        if any(word in op.name for word in _WAITS):
            self._wait()

    def _wait(self, _call: int = -1) -> None:
        self.host_s = max(self.host_s, self.device_s)

    def _work_outside(self, nbytes: int, time_ns: int = 0) -> None:
        issue_s = self._times.backward_op_s if self.phase == BACKWARD else self._times.forward_op_s
        self._issue(issue_s, 1e-9 * time_ns)

    def _issue(self, issue_s: float, kernel_s: float) -> None:
        self.host_s += issue_s
        self.device_s = max(self.device_s, self.host_s) + kernel_s
        self.busy_s += kernel_s

    def _begin_phase(self, phase: int) -> None:
        if phase != BACKWARD:
            self.repeat()
        super()._begin_phase(phase)

    def repeat(self) -> None:
        """Let what ran since the last time run as often as it stands for; each run lasts as long as the one played."""
        now_s = self.host_s, self.device_s, self.busy_s
        self.host_s, self.device_s, self.busy_s = (
            after_s + (self.num_runs - 1) * (after_s - before_s)
            for before_s, after_s in zip(self._before_s, now_s, strict=True)
        )
        self._before_s = self.host_s, self.device_s, self.busy_s

    def _return(self, call: int) -> None:
        super()._return(call)
        if self.phase != FORWARD:
            return
        if call in self._traced:
            self.host_s += self._times.traced_unit_s
        elif call in self.on_tape:
            self.host_s += self.profile.graph_of(self.profile.calls[call]).watched_s(self.decisions[call].watched)


def priced(profile: Profile, host_price: float) -> Profile:
    """Return the profile of the same step on one clock: a mean of both, with this weight of the host's.

    A step takes at least the host's time and at least the device's, and so at least any mean of both.
    """
    device_price = 1 - host_price

    def of_graph(graph: UnitGraph) -> UnitGraph:
        return replace(
            graph,
            ops=tuple(replace(op, time_s=device_price * op.time_s) for op in graph.ops),
            tape_s=host_price * graph.tape_s,
            module_tape_s=tuple((module, host_price * seconds) for module, seconds in graph.module_tape_s),
            again_op_s=host_price * graph.again_op_s,
            parts=tuple(replace(part, gather_s=device_price * part.gather_s) for part in graph.parts),
        )

    return replace(profile, graphs=tuple(map(of_graph, profile.graphs)), host=None)
