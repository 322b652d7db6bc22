"""Plays the copies of offloaded values: counts their bytes on the device, or in host memory, as the engine does.

Also finds when the values are away: they are kept values whose bytes are gone for a while; nothing else changes.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recollect.plans.trip import Trip
from recollect.profile.events import DIES, Key
from recollect.simulation.decisions import CallActions
from recollect.simulation.program import EDGE, Program
from recollect.simulation.windows import EdgeTable
from recollect.slots import SlotList


class Death(weakref.ref[Any]):
    """Refers weakly to an object that is played, and is added to `HostRoom.dead` when that dies.

    No code in Python runs then: a KeyboardInterrupt that came in a destructor would be lost.
    """

    __slots__ = ()

    def end(self, room: Any) -> None:
        """Count what the object held as free, before anything else is counted."""
        raise NotImplementedError


class HostRoom:
    """Host memory of offloaded values while a step is played.

    Attributes:
        num_missed: values that were asked for before they were to leave, or to come back.
        dead: those that died, and still have to end; `died` adds one.
    """

    def __init__(self) -> None:
        self.slots = SlotList()
        self.num_missed = 0
        self.dead: list[Death] = []
        self.died = self.dead.append

    def settle(self) -> None:
        for death in self.dead:
            death.end(self)
        self.dead.clear()

    def sent(self, key: Key) -> None:
        """Note that a copy out begins."""

    def host_changed(self, nbytes: int) -> None:
        """Note that this many more bytes are in host memory, or on their way there."""

    def asked(self, key: Key, *, is_back: bool) -> None:
        self.num_missed += not is_back


class _CopyDeath(Death):
    __slots__ = ("nbytes", "slot")

    nbytes: int
    slot: int | None

    def end(self, room: HostRoom) -> None:
        if self.slot is not None:
            room.slots.give_back(self.slot)
            self.slot = None
            room.host_changed(-self.nbytes)


class SimulatedCopy:
    """An offloaded value; calling it represents the copy back when a recipe runs."""

    __slots__ = ("__weakref__", "_arrived", "_death", "_host", "_key", "_make", "_token")

    def __init__(self, host: HostRoom, key: Key, nbytes: int, token: object, make: Callable[[], object]) -> None:
        self._host = host
        self._key = key
        self._make = make
        self._token: object = token
        self._arrived: object = None
        host.settle()
        death = self._death = _CopyDeath(self, host.died)
        death.nbytes, death.slot = nbytes, host.slots.take(nbytes)
        host.host_changed(nbytes)

    def leave(self) -> None:
        self._token = None

    def come_back(self) -> None:
        """Take up room on the device again, and none in host memory."""
        if self._token is None and self._arrived is None:
            self._arrived = self._make()
            self._death.end(self._host)

    def __call__(self, tensors: list[Any], may_overwrite_first: bool) -> Sequence[Any]:
        """Return the bytes on the device, which should have left and be back."""
        self._host.asked(self._key, is_back=self._arrived is not None)
        self.come_back()
        found = self._token or self._arrived
        self._token = self._arrived = None
        self._death.end(self._host)
        return (found,)


class Holes:
    """Finds the positions in a program between which offloaded values are away."""

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
                    found.append((*away, self._profile.block_bytes(values[value].nbytes)))
        leaves, returns, nbytes = np.array(found, dtype=np.int64).reshape(-1, 3).T
        return np.concatenate((leaves, returns)), np.concatenate((-nbytes, nbytes))

    def away(self, call: int, value: int, trip: Trip) -> tuple[int, int] | None:
        """Return where a value leaves, at the earliest where the model's own code releases it, and where it comes back."""
        leaves, returns = self._edges.leaves(call, trip), self._edges.returns(call, trip)
        dies = self._dies.get((call, value))
        if leaves is None or returns is None or dies is None:
            return None
        begin, end = max(self._positions[leaves], dies), self._positions[returns]
        return (begin, end) if begin < end else None
