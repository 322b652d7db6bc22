"""When each storage of a step is made and freed under a plan, in seconds: the simulation, with the owners written down."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recollect.profile.events import BACKWARD, FORWARD, OPTIMIZER, WORK
from recollect.profile.graph import OpRecord
from recollect.profile.profile import Profile
from recollect.simulation.call_actions import CallActions
from recollect.simulation.program import Instruction, Program
from recollect.simulation.simulate import Owner, Playback, Simulation, Token, calls_on_tape

__all__ = ["LOSS", "Lifetime", "Lifetimes", "lifetimes"]

LOSS = 3
"""What runs in forward after the last unit, as a phase beside those of `recollect.profile.events`."""

# Times are sums of rounded nanoseconds; what is missing beyond this was not recorded.
_MISSING_PART = 0.01


@dataclass(slots=True)
class Lifetime:
    """A storage, or what an op works in (`op` names it then).

    `born` and `died` are numbers of moments: it is alive at those from `born` up to the one before `died`, which is -1
    for what outlives the step.
    """

    owner: Owner
    nbytes: int
    born: int
    recomputed: bool = False
    op: str | None = None
    died: int = -1


@dataclass(frozen=True, eq=False)
class Lifetimes:
    """A simulated step, moment by moment: one whenever something is made or freed, or a phase begins.

    Attributes:
        simulation: the same as `simulate` returns.
        storages: in the order in which they are made.
        time_s: when each moment is. The optimizer's ops are not timed: its moments are all at the end of backward.
        phases: FORWARD, LOSS, BACKWARD or OPTIMIZER, for each moment.
        calls: index of the unit call that runs or is asked by backward, or -1.
        has_times: False if the profile has no times for what runs outside of the units: the rest of `step_s` is then
            spread evenly over these ops.
    """

    simulation: Simulation
    storages: tuple[Lifetime, ...]
    time_s: NDArray[np.float64]
    phases: NDArray[np.int8]
    calls: NDArray[np.int32]
    has_times: bool


def lifetimes(profile: Profile, decisions: Sequence[CallActions]) -> Lifetimes:
    """Play a step back under a plan and write down when each storage lives.

    Args:
        profile: the recorded step.
        decisions: one for each of `profile.calls`, in order.

    Complexity: about three times that of `simulate`.
    """
    untimed_s = _untimed_s(profile)
    playback = _WatchedPlayback(_EveryEvent(profile), decisions, untimed_s or 0.0)
    simulation = playback.run()
    playback.is_over = True
    phases = np.array(playback.phases, dtype=np.int8)
    phases[playback.last_return :][phases[playback.last_return :] == FORWARD] = LOSS
    return Lifetimes(
        simulation=simulation,
        storages=tuple(playback.storages_made),
        time_s=_stretched(np.array(playback.times_s), profile.step_s + simulation.recompute_s),
        phases=phases,
        calls=np.array(playback.calls, dtype=np.int32),
        has_times=untimed_s is None,
    )


def _stretched(time_s: NDArray[np.float64], end_s: float) -> NDArray[np.float64]:
    """Make the last moment what the whole step takes: op times one by one leave out what is between ops."""
    return time_s * (end_s / time_s[-1]) if time_s[-1] > 0 else time_s


def _untimed_s(profile: Profile) -> float | None:
    """Return seconds for each op outside of the units that has no time of its own; None if all have one."""
    works = list(profile.log.operands(WORK))
    times_ns = [time_ns for _, *timed in works for time_ns in timed]
    untimed = len(works) - len(times_ns)
    known_s = sum(profile.graph_of(call).forward_s for call in profile.calls) + sum(1e-9 * ns for ns in times_ns)
    missing_s = profile.step_s - known_s
    if not untimed or missing_s <= _MISSING_PART * profile.step_s:
        return None
    return missing_s / untimed


class _EveryEvent(Program):
    """Nothing is worked out in advance: each storage has its own token."""

    def counted(self, call: int, dropped: frozenset[int]) -> frozenset[int]:
        return frozenset()

    def _instructions(self) -> Iterator[Instruction]:
        return ((event[0], self.operands(event)) for event in self.profile.log.events())


class _WatchedToken(Token):
    """Notes when its bytes are made and freed."""

    __slots__ = ("lifetime", "watch")

    def __init__(self, playback: _WatchedPlayback, nbytes: int, owner: Owner) -> None:
        super().__init__(playback, nbytes, owner)
        self.watch = playback
        self.lifetime = playback.begin(owner, nbytes)

    def __del__(self) -> None:
        super().__del__()
        self.watch.end(self.lifetime)


class _WatchedPlayback(Playback):
    token_type = _WatchedToken

    def __init__(self, program: Program, decisions: Sequence[CallActions], untimed_s: float) -> None:
        super().__init__(program, dict(enumerate(decisions)), calls_on_tape(decisions))
        self.untimed_s = untimed_s
        self.is_over = False
        self.clock_s = 0.0
        self.times_s: list[float] = []
        self.phases: list[int] = []
        self.calls: list[int] = []
        self.storages_made: list[Lifetime] = []
        self.last_return = 0
        self.moment()

    def moment(self) -> int:
        """Write down that something changes now."""
        self.times_s.append(self.clock_s)
        self.phases.append(self.phase)
        self.calls.append(self.call)
        return len(self.times_s) - 1

    def begin(self, owner: Owner, nbytes: int, op: str | None = None) -> Lifetime:
        """Note that a storage is made."""
        made = Lifetime(owner, nbytes, self.moment(), recomputed=bool(self.is_recomputing), op=op)
        self.storages_made.append(made)
        return made

    def end(self, lifetime: Lifetime) -> None:
        """Note that it is freed."""
        if not self.is_over:
            lifetime.died = self.moment()

    def actions(self) -> dict[int, Callable[..., None]]:
        return {**super().actions(), WORK: self._work_outside}

    def work(self, op: OpRecord) -> None:
        self._work(op.working_bytes, op.time_s, op.name)

    def _work_outside(self, nbytes: int, time_ns: int | None = None) -> None:
        self._work(nbytes, self.untimed_s if time_ns is None else 1e-9 * time_ns, "")

    def _work(self, nbytes: int, time_s: float, name: str) -> None:
        self._bulk(nbytes, 0)
        working = self.begin((self.call, -1), nbytes, op=name) if nbytes else None
        self.clock_s += time_s
        if working is not None:
            self.end(working)

    def _return(self, call: int) -> None:
        super()._return(call)
        if self.phase == FORWARD:
            self.last_return = len(self.times_s)

    def _begin_phase(self, phase: int) -> None:
        super()._begin_phase(phase)
        if phase in (BACKWARD, OPTIMIZER):
            self.moment()
