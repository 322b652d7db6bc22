"""Records when each storage of a step is made and freed under a plan, in seconds, and who owns it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recollect.profile.events import BACKWARD, FORWARD, OP, OPTIMIZER, PHASE, WORK, Key
from recollect.profile.graph import OpRecord
from recollect.profile.profile import Profile
from recollect.simulation.decisions import CallActions, calls_on_tape
from recollect.simulation.playback import OUTSIDE, Freed, Owner, Playback, Token
from recollect.simulation.program import Program
from recollect.simulation.simulate import Simulation, run
from recollect.simulation.windows import edges_for

LOSS = 3
"""Forward after the last unit: an additional phase to those in `recollect.profile.events`."""


@dataclass(slots=True)
class Lifetime:
    """A storage, or an op's workspace (`op` then names the op).

    It is alive from moment `born` up to but excluding moment `died`, which is -1 for those that outlive the step.
    """

    owner: Owner
    nbytes: int
    born: int
    recomputed: bool = False
    op: str | None = None
    died: int = -1

    def is_alive_at(self, moment: int) -> bool:
        return self.born < moment and not 0 <= self.died <= moment


@dataclass(frozen=True, eq=False)
class Lifetimes:
    """A simulated step as moments: one each time something is made or freed, or a phase begins."""

    simulation: Simulation
    storages: tuple[Lifetime, ...]
    """All storages, in the order in which they are made."""
    time_s: NDArray[np.float64]
    """Time of each moment. The optimizer's ops are not timed: all its moments are at the end of backward."""
    phases: NDArray[np.int8]
    """FORWARD, LOSS, BACKWARD or OPTIMIZER, for each moment."""
    calls: NDArray[np.int32]
    """Index of the unit call that runs, or whose values backward asks for; -1 if none."""
    backwards: tuple[int, ...]
    """The moments at which backward begins."""
    began: Mapping[int, int]
    """For each call that has an op, the moment at which the first one runs."""
    reruns: tuple[tuple[int, OpRecord, int], ...]
    """Each op that runs again, with its call and the moment at which it begins."""
    host_changes: tuple[tuple[int, int], ...] = ()
    """Each moment at which an offloaded value takes up host memory, or gives it back, and by how many bytes."""


def lifetimes(profile: Profile, decisions: Sequence[CallActions]) -> Lifetimes:
    """Play a step back under a plan and record when each storage lives; takes about three times as long as `simulate`."""
    playback = _TimedPlayback(EveryEvent(profile, edges=edges_for(profile, decisions)), decisions)
    simulation = run(playback)
    playback.settle()
    if playback.phase == FORWARD:
        playback.losses.append((playback.last_return, len(playback.times_s)))
    times_s = np.array(playback.times_s)
    ends = zip(simulation.left_bytes, playback.early_at, strict=False)
    left = [Lifetime((OUTSIDE, -1), nbytes, 0, died=died) for nbytes, died in ends if nbytes]
    if times_s[-1] > 0:
        # So that the last is the whole step's: the ops' own times leave out the gaps between them.
        times_s *= (profile.step_s + simulation.recompute_s) / times_s[-1]
    phases = np.array(playback.phases, dtype=np.int8)
    for start, end in playback.losses:
        phases[start:end] = LOSS
    return Lifetimes(
        simulation=simulation,
        storages=(*playback.storages_made, *left),
        time_s=times_s,
        phases=phases,
        calls=np.array(playback.calls, dtype=np.int32),
        backwards=tuple(playback.backwards),
        began=playback.began,
        reruns=tuple(playback.reruns),
        host_changes=tuple(playback.host_changes),
    )


class EveryEvent(Program):
    """Computes nothing in advance, and gives every value its own token, even if counting bytes would do."""

    bulk_codes = frozenset()

    def counted(self, call: int, dropped: frozenset[int]) -> frozenset[int]:
        return frozenset()


class _Ended(Freed):
    __slots__ = ("made",)

    made: Lifetime

    def end(self, room: _TimedPlayback) -> None:
        super().end(room)
        room.end(self.made)


class _TimedToken(Token):
    __slots__ = ()

    def __init__(self, playback: _TimedPlayback, nbytes: int, owner: Owner) -> None:
        super().__init__(playback, nbytes, owner)
        death = self.death = _Ended(self, playback.died)
        death.nbytes, death.made = nbytes, playback.begin(owner, nbytes)


class ClockedPlayback(Playback):
    """Plays a step with a clock.

    Attributes:
        clock_s: seconds so far.
        num_runs: the number of equal runs of the real step that what is played stands for; see `profile.repeated_steps`.
        of_all_s: seconds so far, of all of these.
        edge_s: time of each edge.
        made_s: when the copy out of each offloaded value begins.
        asked_s: for each value that is asked for in backward: the number of the edge before that happens first, and the time.
    """

    def __init__(self, program: EveryEvent, decisions: Sequence[CallActions]) -> None:
        super().__init__(program, dict(enumerate(decisions)), calls_on_tape(decisions))
        self.clock_s = self.of_all_s = 0.0
        self._nums_runs = _nums_runs(program.profile)
        self.num_runs = next(self._nums_runs)
        self.edge_s: list[float] = []
        self.made_s: dict[Key, float] = {}
        self.asked_s: dict[Key, tuple[int, float]] = {}

    def actions(self) -> dict[int, Callable[..., None]]:
        return {**super().actions(), WORK: self._work_outside}

    def work(self, op: OpRecord) -> None:
        self._work(op.working_bytes, op.time_s, op.name)

    def _work_outside(self, nbytes: int, time_ns: int = 0) -> None:
        self._work(nbytes, 1e-9 * time_ns, "")

    def _work(self, nbytes: int, time_s: float, name: str) -> None:
        self._bulk(nbytes, 0)
        self.spends(time_s)

    def spends(self, time_s: float) -> None:
        self.settle()
        self.clock_s += time_s
        self.of_all_s += self.num_runs * time_s

    def _begin_phase(self, phase: int) -> None:
        super()._begin_phase(phase)
        if phase != BACKWARD:
            self.num_runs = next(self._nums_runs)

    def _edge(self, phase: int, call: int) -> None:
        self.edge_s.append(self.clock_s)
        super()._edge(phase, call)

    def sent(self, key: Key) -> None:
        self.made_s[key] = self.clock_s

    def asked(self, key: Key, *, is_back: bool) -> None:
        """Note when something first asks for a value in backward."""
        super().asked(key, is_back=is_back)
        if self.phase == BACKWARD:
            self.asked_s.setdefault(key, (len(self.edge_s) - 1, self.clock_s))


def _nums_runs(profile: Profile) -> Iterator[int]:
    """Yield for each forward with its backward, and for each optimizer step, how many equal ones it stands for."""
    num_runs = 1
    for code, number, *_ in profile.log.events:
        if code == OP:
            num_runs = profile.calls[number].num_runs
        elif code == PHASE and number != BACKWARD:
            yield num_runs
            num_runs = 1
    yield num_runs


class _TimedPlayback(ClockedPlayback):
    token_type = _TimedToken

    def __init__(self, program: EveryEvent, decisions: Sequence[CallActions]) -> None:
        super().__init__(program, decisions)
        self.times_s: list[float] = []
        self.phases: list[int] = []
        self.calls: list[int] = []
        self.storages_made: list[Lifetime] = []
        # Where the last unit of a forward returned, and the stretches after that, up to backward.
        self.last_return = 0
        self.losses: list[tuple[int, int]] = []
        self.backwards: list[int] = []
        self.began: dict[int, int] = {}
        self.reruns: list[tuple[int, OpRecord, int]] = []
        self.host_changes: list[tuple[int, int]] = []
        self.early_at: list[int] = []
        self.moment()

    def moment(self) -> int:
        """Record that something changes now; return the number of the moment."""
        self.times_s.append(self.clock_s)
        self.phases.append(self.phase)
        self.calls.append(self.call)
        return len(self.times_s) - 1

    def begin(self, owner: Owner, nbytes: int, op: str | None = None) -> Lifetime:
        made = Lifetime(owner, nbytes, self.moment(), recomputed=bool(self.is_recomputing), op=op)
        self.storages_made.append(made)
        return made

    def end(self, made: Lifetime) -> None:
        made.died = self.moment()

    def host_changed(self, nbytes: int) -> None:
        self.host_changes.append((len(self.times_s) - 1, nbytes))

    def actions(self) -> dict[int, Callable[..., None]]:
        """Return handlers that first end dead objects: at the time, and in the call, in which they died."""
        return {code: partial(self._settled, handler) for code, handler in super().actions().items()}

    def _settled(self, handler: Callable[..., None], *operands: Any) -> None:
        self.settle()
        handler(*operands)

    def _work(self, nbytes: int, time_s: float, name: str) -> None:
        self.settle()
        working = self.begin((self.call, -1), nbytes, op=name) if nbytes else None
        super()._work(nbytes, time_s, name)
        if working is not None:
            self.end(working)

    def works_in(self, call: int, nbytes: int) -> None:
        self.settle()
        if nbytes > 0:
            self.end(self.begin((call, -1), nbytes, op="compiled code"))

    def runs_again(self, call: int, op: OpRecord) -> None:
        super().runs_again(call, op)
        self.reruns.append((call, op, self.moment()))

    def starts(self, call: int) -> None:
        self.began.setdefault(call, len(self.times_s))
        super().starts(call)

    def note_early(self) -> None:
        super().note_early()
        self.early_at.append(len(self.times_s))

    def _return(self, call: int) -> None:
        super()._return(call)
        if self.phase == FORWARD:
            self.last_return = len(self.times_s)

    def _begin_phase(self, phase: int) -> None:
        if phase != FORWARD and self.phase == FORWARD:
            self.losses.append((self.last_return, len(self.times_s)))
        elif self.phase != FORWARD:
            self.last_return = len(self.times_s)
        super()._begin_phase(phase)
        if phase == BACKWARD:
            self.backwards.append(self.moment())
        elif phase == OPTIMIZER:
            self.moment()
