"""Splits a step into windows, each in the forward or the backward of one unit call, and finds which calls are alive in each.

It also finds the edges of units: the moments when offloaded values leave the device and come back.

An edge in forward is where a different unit's call begins or can begin: where the last one returns. An edge in backward is
where backward reaches a call: the last one that saved a value still needed. `recollect.engine.offload.flight` finds
them in the real step.
Calls are counted from the first one after a backward; copies belong to that stretch of forward and the backward after it.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from recollect.errors import PlanError
from recollect.plans.trip import Trip
from recollect.profile.events import BACKWARD, FORWARD, OP, PEEK, PHASE, RELEASE, RETURN, SAVE, USE, StepLog
from recollect.profile.profile import Profile
from recollect.simulation.decisions import CallActions


@dataclass(frozen=True, slots=True)
class Window:
    """The events from `start` (a position in the log) to the next window: the work of one unit call in one phase.

    In backward, that call is the last one with saved values that this backward has yet to use; meanwhile it may also use
    what earlier calls saved. Ops outside the units, such as the loss, belong to the call before them; `call` is -1
    before the first call.
    """

    start: int
    phase: int
    call: int


def windows(profile: Profile) -> list[Window]:
    """Return the windows of a step in order; the first starts at 0."""
    scan = _Scan(profile.log)
    handlers: dict[int, Callable[..., None]] = {PHASE: scan.begin_phase, OP: scan.op, SAVE: scan.save}
    handlers |= {USE: scan.use, PEEK: scan.use}
    found = [Window(0, scan.phase, scan.call)]
    for position, _ in enumerate(profile.log.play(handlers)):
        if (scan.phase, scan.call) != (found[-1].phase, found[-1].call):
            # Drop a window that would be empty.
            if found[-1].start == position:
                found.pop()
            found.append(Window(position, scan.phase, scan.call))
    return found


class _Scan:
    """Tracks which call runs in forward, and which one backward is in."""

    def __init__(self, log: StepLog) -> None:
        self.phase = FORWARD
        self.call = -1
        # How often each handle is used before the first phase begins, and in each phase.
        uses: list[Counter[int]] = [Counter()]
        for code, number, *_ in log.events:
            if code == PHASE:
                uses.append(Counter())
            elif code in (PEEK, USE):
                uses[-1][number] += 1
        self._uses = iter(uses)
        # Of the handles that are saved and not yet used to the end: who saved them, and the uses left in this phase.
        self._saver: dict[int, int] = {}
        self._uses_left = next(self._uses)
        # How many saved values of each call this phase has yet to use.
        self._num_waiting: Counter[int] = Counter()

    def begin_phase(self, phase: int) -> None:
        self.phase = phase
        self._uses_left = next(self._uses)
        self._num_waiting = Counter(self._saver[handle] for handle in self._uses_left if handle in self._saver)

    def op(self, call: int, _op: int) -> None:
        self.call = call

    def save(self, _call: int, _value: int, handle: int, saver: int) -> None:
        self._saver[handle] = saver
        if self._uses_left[handle]:
            self._num_waiting[saver] += 1

    def use(self, handle: int) -> None:
        if handle not in self._saver:
            return
        self.call = max(self._num_waiting)
        self._uses_left[handle] -= 1
        if not self._uses_left[handle]:
            saver = self._saver[handle]
            self._num_waiting[saver] -= 1
            if not self._num_waiting[saver]:
                del self._num_waiting[saver]


def alive_calls(profile: Profile, windows: Sequence[Window]) -> NDArray[np.bool_]:
    """Return for each window and call whether the call ran before and backward has yet to use what it made or saved.

    A window does not list the call that it belongs to.
    """
    num_calls = len(profile.calls)
    began = np.full(num_calls, np.iinfo(np.int64).max)
    needed = np.full(num_calls, -1)
    callers: dict[int, tuple[int, int]] = {}
    for position, (code, first, *rest) in enumerate(profile.log.events):
        if code == OP:
            began[first] = min(began[first], position)
        elif code == SAVE:
            callers[rest[1]] = first, rest[2]
        elif code in (PEEK, USE) and first in callers:
            needed[list(callers[first])] = position
    starts = np.array([window.start for window in windows], dtype=np.int64)[:, None]
    own = np.array([window.call for window in windows], dtype=np.int64)[:, None]
    return (began < starts) & (starts <= needed) & (own != np.arange(num_calls))


def num_alive(profile: Profile, windows: Sequence[Window], units: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    """Return for each window and unit how many of its calls are alive, as `alive_calls` says.

    A call that saves less than the largest of its unit counts as that part of one.
    """
    alive = alive_calls(profile, windows)
    saved_bytes = [profile.graph_of(call).saved_bytes for call in profile.calls]
    counts = np.zeros((len(windows), len(units)))
    for unit, calls in enumerate(units):
        most = max(saved_bytes[call] for call in calls)
        parts = np.array([saved_bytes[call] / most if most else 1.0 for call in calls])
        counts[:, unit] = alive[:, list(calls)] @ parts
    return counts


def calls_besides(
    profile: Profile, windows: Sequence[Window], units: Sequence[Sequence[int]], places: Sequence[int]
) -> NDArray[np.float64] | None:
    """Return `num_alive`, minus one for each unit before the window's own.

    None if that is 0 everywhere: all units run once, and one backward takes them in reverse.
    """
    phases = [None, *(window.phase for window in windows)]
    num_backwards = sum(after == BACKWARD != before for before, after in pairwise(phases))
    if len(profile.calls) == len(units) and num_backwards <= 1:
        return None
    counts = num_alive(profile, windows, units)
    counts -= np.arange(len(units)) < np.array(places)[:, None]
    return counts if counts.any() else None


def most_alive(profile: Profile, windows: Sequence[Window]) -> dict[str, int]:
    """Return for each path of a unit how many of its calls wait for backward at once, at most; 1 if none ever does."""
    alive = alive_calls(profile, windows)
    # The call that a window belongs to is alive in it.
    for number, window in enumerate(windows):
        if window.call >= 0:
            alive[number, window.call] = True
    return {p: max(1, int(alive[:, calls].sum(axis=1).max(initial=0))) for p, calls in profile.calls_by_path.items()}


@dataclass(frozen=True, slots=True)
class Edge:
    """A moment of a step."""

    start: int
    """The position in the log of the event that comes next."""
    phase: int
    """FORWARD or BACKWARD."""
    call: int
    """The call that begins here or could begin next, or that backward reaches."""


def edges(profile: Profile) -> list[Edge]:
    return _EdgeScan(profile).edges


class EdgeTable:
    """Finds the edges where values leave and come back."""

    def __init__(self, edges: Sequence[Edge]) -> None:
        # Of each stretch of forward with the backward after it: (call, number of the edge), in order.
        self._stretches: list[tuple[list[tuple[int, int]], list[tuple[int, int]]]] = []
        self._stretch_of: dict[int, int] = {}
        for number, edge in enumerate(edges):
            if edge.phase == FORWARD and (not self._stretches or self._stretches[-1][1]):
                self._stretches.append(([], []))
            self._stretches[-1][edge.phase == BACKWARD].append((edge.call, number))
            self._stretch_of.setdefault(edge.call, len(self._stretches) - 1)

    def leaves(self, call: int, trip: Trip) -> int | None:
        """Return the number of the edge where a call's value leaves; None if there is none."""
        if trip.leaves_in_backward:
            return self._reaches(call, call + trip.leaves)
        if call not in self._stretch_of:
            return None
        forward, backward = self._stretches[self._stretch_of[call]]
        after = bisect_left(forward, (call + trip.leaves, -1))
        if after < len(forward):
            return forward[after][1]
        return backward[0][1] if backward else None

    def returns(self, call: int, trip: Trip) -> int | None:
        """Return the number of the edge where it comes back; None if there is none."""
        return self._reaches(call, call + trip.returns)

    def _reaches(self, call: int, other: int) -> int | None:
        """Return the edge where the backward after a call reaches a second given call, or one before that."""
        if call not in self._stretch_of:
            return None
        _, backward = self._stretches[self._stretch_of[call]]
        return next((number for reached, number in backward if reached <= other), None)


def returning_values(profile: Profile) -> frozenset[tuple[int, int]]:
    """Return the values that backward needs in units, as (call, value): those worth offloading."""
    return frozenset(_EdgeScan(profile).used)


class _EdgeScan:
    """Walks over a step.

    Attributes:
        used: values saved in units that backward asked for, as (call, value).
    """

    def __init__(self, profile: Profile) -> None:
        self.edges: list[Edge] = []
        self.used: set[tuple[int, int]] = set()
        self._begun: set[int] = set()
        # The first call after the last backward.
        self._first_call = 0
        self._returned: set[int] = set()
        # Of the handles that backward may still ask for: the saved value and its saver; and the number that each call has.
        self._handles: dict[int, tuple[int, int, int]] = {}
        self._waiting: Counter[int] = Counter()
        self._phase, self._call = FORWARD, -1
        handlers: dict[int, Callable[..., None]] = {
            OP: self._begin,
            RETURN: self._return,
            SAVE: self._save,
            USE: self._use,
            PEEK: self._use,
        }
        handlers |= {RELEASE: self._forget, PHASE: self._begin_phase}
        self._position = 0
        for self._position, event in enumerate(profile.log.events):
            if event[0] in handlers:
                handlers[event[0]](*event[1:])
        if self.edges and self.edges[-1].start > self._position:
            self.edges.pop()

    def _begin_phase(self, phase: int) -> None:
        self._phase, self._call = phase, -1

    def _begin(self, call: int, *_: int) -> None:
        self._add(self._position, call)

    def _add(self, start: int, call: int) -> None:
        if call not in self._begun and self._phase == FORWARD:
            self._begun.add(call)
            self.edges.append(Edge(start, FORWARD, call))

    def _return(self, call: int) -> None:
        self._begin(call)
        self._returned.add(call)
        if call >= self._first_call:
            self._add(self._position + 1, call + 1)

    def _save(self, call: int, value: int, handle: int, saver: int) -> None:
        # A value saved between units counts for the call that made it.
        if saver not in self._returned and self._phase == FORWARD:
            self._begin(saver)
            self._handles[handle] = call, value, saver
            self._waiting[saver] += 1

    def _use(self, handle: int) -> None:
        if handle not in self._handles or self._phase != BACKWARD:
            return
        call = max(self._waiting)
        if call != self._call:
            self._call = call
            self._first_call = max(self._begun) + 1
            self.edges.append(Edge(self._position, BACKWARD, call))
        self.used.add(self._handles[handle][:2])
        self._forget(handle)

    def _forget(self, handle: int) -> None:
        if handle in self._handles:
            *_, saver = self._handles.pop(handle)
            self._waiting[saver] -= 1
            if not self._waiting[saver]:
                del self._waiting[saver]


def edges_for(profile: Profile, decisions: Sequence[CallActions]) -> list[Edge]:
    """Return the edges of a step for decisions that offload something; none for others."""
    if not any(decision.trips for decision in decisions):
        return []
    if any(True for _ in profile.log.operands(PEEK)):
        raise PlanError(
            "cannot predict the plan: it offloads values, and a backward of the recorded step keeps its graph (retain_graph, "
            "or the halves of a zero-bubble pipeline), so they would have to come back twice. Make a plan that offloads "
            "nothing."
        )
    return edges(profile)
