"""Finds when offloaded values are away: they are kept values whose bytes are gone for a while, and nothing else changes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from recollect.plans.trip import Trip
from recollect.profile.events import BACKWARD, DIES, FORWARD
from recollect.simulation.decisions import CallActions
from recollect.simulation.program import EDGE, Key, Program, rounded_bytes

__all__ = ["Holes"]


class _Stretch:
    """A stretch of forward with the backward after it: calls and positions of its edges, in order."""

    def __init__(self) -> None:
        self.forward: list[tuple[int, int]] = []
        self.backward: list[tuple[int, int]] = []

    def leaves(self, call: int, trip: Trip) -> int | None:
        """Return the position at which a value of a call leaves."""
        if trip.leaves_in_backward:
            return self.reaches(call + trip.leaves)
        after = bisect_left(self.forward, (call + trip.leaves, -1))
        if after < len(self.forward):
            return self.forward[after][1]
        return self.backward[0][1] if self.backward else None

    def reaches(self, call: int) -> int | None:
        """Return the position at which backward comes to a call, or to an earlier one."""
        return next((position for reached, position in self.backward if reached <= call), None)


class Holes:
    """Finds the positions in a program between which offloaded values are away.

    Args:
        program: of a profile, with edges.

    Complexity: one pass over the instructions; then two searches for each offloaded value.
    """

    def __init__(self, program: Program) -> None:
        self._profile = program.profile
        self._stretch_of: dict[int, _Stretch] = {}
        self._dies: dict[Key, int] = {}
        stretch = _Stretch()
        for position, (code, operands) in enumerate(program.instructions):
            if code == DIES:
                self._dies[operands[0]] = position
            elif code == EDGE:
                phase, call = operands
                if phase == FORWARD and stretch.backward:
                    stretch = _Stretch()
                (stretch.backward if phase == BACKWARD else stretch.forward).append((call, position))
                self._stretch_of.setdefault(call, stretch)

    def changes(self, decisions: Sequence[CallActions]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where offloaded values leave and come back, and by how many bytes memory changes there."""
        found = []
        for call, decision in enumerate(decisions):
            values = self._profile.graph_of(self._profile.calls[call]).values
            for value, trip in decision.trips:
                away = self.away(call, value, trip)
                if away is not None:
                    found.append((*away, rounded_bytes(self._profile, values[value].nbytes)))
        leaves, returns, nbytes = np.array(found, dtype=np.int64).reshape(-1, 3).T
        return np.concatenate((leaves, returns)), np.concatenate((-nbytes, nbytes))

    def away(self, call: int, value: int, trip: Trip) -> tuple[int, int] | None:
        """Return where a value leaves, at the earliest where the model's own code lets go of it, and where it comes back."""
        stretch = self._stretch_of.get(call)
        dies = self._dies.get((call, value))
        if stretch is None or dies is None:
            return None
        leaves, returns = stretch.leaves(call, trip), stretch.reaches(call + trip.returns)
        if leaves is None or returns is None or max(leaves, dies) >= returns:
            return None
        return max(leaves, dies), returns
