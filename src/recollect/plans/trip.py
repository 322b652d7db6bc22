"""Defines when an offloaded value leaves the device and comes back, and starts the copies then.

The engine and the simulator share the `Timetable`, so the engine does exactly what the simulator predicts.
"""

import weakref
from collections import defaultdict
from typing import NamedTuple, Protocol

from recollect.errors import PlanError


class Trip(NamedTuple):
    """When an offloaded value leaves the device and comes back, in runs of units counted from the one that computes it.

    The copy out begins as soon as the value exists. Both moments are planned, so memory does not depend on the speed of
    copies: code that reaches one too early waits.

    Attributes:
        leaves: the device has its bytes until this many more units have begun: 1 until the next one does, or can, as
            this one has returned.
        returns: the copy back begins when backward reaches the unit that ran this many later: 0 is its own.
        leaves_in_backward: `leaves` counts like `returns`: until backward reaches the unit that ran this many units later.
            It then has to be more than `returns`, as backward takes units in reverse.

    Example:
        >>> Trip(leaves=2, returns=1)
        Trip(leaves=2, returns=1, leaves_in_backward=False)
    """

    leaves: int = 1
    returns: int = 1
    leaves_in_backward: bool = False


def checked_trip(what: str, trip: Trip) -> Trip:
    least = trip.returns + 1 if trip.leaves_in_backward else 1
    if trip.returns < 0 or trip.leaves < least:
        raise PlanError(
            f"{what}: got leaves={trip.leaves}, returns={trip.returns}"
            f"{', leaves_in_backward=True' if trip.leaves_in_backward else ''}, expected returns of 0 or more, and leaves of "
            f"{least} or more"
        )
    return trip


class Copy(Protocol):
    """A value that is copied to host memory."""

    def leave(self) -> None:
        """Release the value's bytes on the device, once they have been copied."""
        ...

    def come_back(self) -> None: ...


class Timetable:
    """Moves copies out and back as runs of units begin, and as backward reaches them.

    Runs are numbered as they begin. It does not keep copies alive: unneeded ones neither leave nor come back.
    """

    def __init__(self) -> None:
        self._leaving: defaultdict[int, list[weakref.ref[Copy]]] = defaultdict(list)
        self._leaving_in_backward: defaultdict[int, list[weakref.ref[Copy]]] = defaultdict(list)
        self._returning: defaultdict[int, list[weakref.ref[Copy]]] = defaultdict(list)
        self._returns: list[tuple[int, weakref.ref[Copy]]] = []

    def add(self, copy: Copy, run: int, trip: Trip) -> None:
        leaving = self._leaving_in_backward if trip.leaves_in_backward else self._leaving
        reference: weakref.ref[Copy] = weakref.ref(copy)
        leaving[run + trip.leaves].append(reference)
        self._returning[run + trip.returns].append(reference)
        self._returns.append((run + trip.returns, reference))

    def forward(self, run: int) -> None:
        for number in [number for number in self._leaving if number <= run]:
            _have_leave(self._leaving.pop(number))

    def backward(self, run: int) -> None:
        """Note that backward reaches a run: overdue values leave now, and values that are due come back."""
        if self._leaving:
            self.forward(max(self._leaving))
        for number in sorted(number for number in self._leaving_in_backward if number >= run):
            _have_leave(self._leaving_in_backward.pop(number))
        for number in sorted((number for number in self._returning if number >= run), reverse=True):
            for reference in reversed(self._returning.pop(number)):
                if (found := reference()) is not None:
                    found.come_back()

    def end(self) -> None:
        """Have all remaining values leave: while they are on the device, their bytes may hold them."""
        for _, reference in self._returns:
            if (found := reference()) is not None:
                found.leave()

    def begin_again(self) -> None:
        """Bring all values back again, in one more backward."""
        self._returning.clear()
        for number, reference in self._returns:
            self._returning[number].append(reference)


def _have_leave(references: list[weakref.ref[Copy]]) -> None:
    for reference in references:
        if (found := reference()) is not None:
            found.leave()
