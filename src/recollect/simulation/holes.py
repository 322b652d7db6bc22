"""Finds when offloaded values are away: they are kept values whose bytes are gone for a while, and nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from recollect.plans.trip import Trip
from recollect.profile.events import DIES
from recollect.simulation.decisions import CallActions
from recollect.simulation.edges import EdgeTable
from recollect.simulation.program import EDGE, Key, Program, rounded_bytes


class Holes:
    """Finds the positions in a program between which offloaded values are away.

    Args:
        program: of a profile, with edges.

    Complexity: one pass over the instructions; then two searches for each offloaded value.
    """

    def __init__(self, program: Program) -> None:
        self._profile = program.profile
        self._edges = EdgeTable(program.edges)
        self._positions: list[int] = []
        self._dies: dict[Key, int] = {}
        for position, (code, operands) in enumerate(program.instructions):
            if code == DIES:
                self._dies[operands[0]] = position
            elif code == EDGE:
                self._positions.append(position)

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
        leaves, returns = self._edges.leaves(call, trip), self._edges.returns(call, trip)
        dies = self._dies.get((call, value))
        if leaves is None or returns is None or dies is None:
            return None
        begin, end = max(self._positions[leaves], dies), self._positions[returns]
        return (begin, end) if begin < end else None
