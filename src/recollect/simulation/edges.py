"""Finds the edges of units in a step: the moments at which offloaded values leave the device and come back.

An edge in forward is where another unit's call begins or can begin: where the last one returns. One in backward is where
backward comes to a call: to the last one that saved something which it may still use. `recollect.engine.offload.flight` finds
them in the real step.
Calls are counted from the first one after a backward; copies belong to that stretch of forward and the backward after it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from recollect.errors import PlanError
from recollect.plans.trip import Trip
from recollect.profile.events import BACKWARD, FORWARD, OP, PEEK, PHASE, RELEASE, RETURN, SAVE, USE
from recollect.profile.profile import Profile
from recollect.simulation.decisions import CallActions


@dataclass(frozen=True, slots=True)
class Edge:
    """A moment of a step.

    Attributes:
        start: the position in the log of the event that comes next.
        phase: FORWARD or BACKWARD.
        call: the call that begins, or would be the next to, or that backward comes to.
    """

    start: int
    phase: int
    call: int


def edges(profile: Profile) -> list[Edge]:
    """Return the edges of a step, in order.

    Complexity: one pass over the events.
    """
    return _Scan(profile).edges


class EdgeTable:
    """Finds the edges at which values leave and come back.

    Args:
        edges: of a step, in order.
    """

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
        """Return the number of the edge at which a value of a call leaves; None if there is none."""
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
        """Return the number of the edge at which it comes back; None if there is none."""
        return self._reaches(call, call + trip.returns)

    def _reaches(self, call: int, other: int) -> int | None:
        """Return the edge at which the backward after a call comes to another one, or to an earlier one."""
        if call not in self._stretch_of:
            return None
        _, backward = self._stretches[self._stretch_of[call]]
        return next((number for reached, number in backward if reached <= other), None)


def returning_values(profile: Profile) -> frozenset[tuple[int, int]]:
    """Return what backward asks for in units, as (call, value): what it pays to offload."""
    return frozenset(_Scan(profile).used)


class _Scan:
    """Walks over a step.

    Attributes:
        edges: of the step.
        used: what backward asked for of what was saved in units, as (call, value).
    """

    def __init__(self, profile: Profile) -> None:
        self.edges: list[Edge] = []
        self.used: set[tuple[int, int]] = set()
        self._begun: set[int] = set()
        # The first call after the last backward.
        self._first_call = 0
        self._returned: set[int] = set()
        # Of the handles that backward may still ask for: what was saved, and by whom; and how many each call has.
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
        for self._position, event in enumerate(profile.log.events()):
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
        # What is saved between units goes by the call that made it.
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
    """Return the edges of a step for decisions that offload something; none for others.

    Raises:
        PlanError: a backward of the step keeps its graph, so that a value would have to come back twice.
    """
    if not any(decision.trips for decision in decisions):
        return []
    if any(True for _ in profile.log.operands(PEEK)):
        raise PlanError(
            "cannot predict the plan: it offloads values, and a backward of the recorded step keeps its graph (retain_graph, "
            "or the halves of a zero-bubble pipeline), so that they would have to come back twice. Make a plan that offloads "
            "nothing."
        )
    return edges(profile)
