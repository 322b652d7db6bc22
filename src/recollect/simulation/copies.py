"""Plays the copies of offloaded values: counts their bytes on the device, or in host memory, as the engine has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from recollect.simulation.program import Key
from recollect.slots import SlotList


class HostRoom:
    """What offloaded values take up in host memory.

    Attributes:
        slots: room for each.
        num_missed: values that were asked for before they were to leave, or to come back.
    """

    def __init__(self) -> None:
        self.slots = SlotList()
        self.num_missed = 0

    def sent(self, key: Key) -> None:
        """Note that a copy out begins."""

    def changed(self, nbytes: int) -> None:
        """Note that so many bytes more are in host memory, or on their way there."""

    def asked(self, key: Key, *, is_back: bool) -> None:
        """Note that something asks for a value."""
        self.num_missed += not is_back


class SimulatedCopy:
    """An offloaded value; calling it stands for what copies it back when a recipe is run.

    Args:
        host: where it goes.
        key: the value.
        nbytes: its size.
        token: stands for its bytes on the device.
        make: allocates them again.
    """

    __slots__ = ("__weakref__", "_arrived", "_host", "_key", "_make", "_nbytes", "_slot", "_token")

    def __init__(self, host: HostRoom, key: Key, nbytes: int, token: object, make: Callable[[], object]) -> None:
        self._host = host
        self._key = key
        self._make = make
        self._nbytes = nbytes
        self._token: object = token
        self._arrived: object = None
        self._slot = host.slots.take(nbytes)
        host.changed(nbytes)

    def leave(self) -> None:
        """Leave the device."""
        self._token = None

    def come_back(self) -> None:
        """Take up room on the device again, and none in host memory."""
        if self._token is None and self._arrived is None:
            self._arrived = self._make()
            self._give_back()

    def __call__(self, tensors: list[Any], may_overwrite_first: bool) -> Sequence[Any]:
        """Return the bytes on the device, which should have left and be back."""
        self._host.asked(self._key, is_back=self._arrived is not None)
        self.come_back()
        found = self._token or self._arrived
        self._token = self._arrived = None
        self._give_back()
        return (found,)

    def _give_back(self) -> None:
        if self._slot is not None:
            self._host.slots.give_back(self._slot)
            self._slot = None
            self._host.changed(-self._nbytes)

    def __del__(self) -> None:
        self._give_back()
