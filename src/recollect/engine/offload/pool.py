"""Deals out slots in host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from recollect.slots import SlotList

__all__ = ["HostPool", "Slot"]

# Where it is not known how much is needed: the first slab, and then each as large as all before it.
_FIRST_SLAB_BYTES = 16 * 2**20


@dataclass(slots=True, eq=False)
class Slot:
    """Room for one value.

    Attributes:
        memory: its bytes.
        readers: tickets of the copies back that may still read them, from earlier values.
        slab: its slab's number.
        begin: where it begins there.
    """

    memory: torch.Tensor
    readers: list[Any]
    slab: int
    begin: int


@dataclass(slots=True, eq=False)
class _Slab:
    memory: torch.Tensor
    slots: SlotList
    # Of the slots that were given back: begin, end, and the copy that may still read them.
    reading: list[tuple[int, int, Any]]


class HostPool:
    """Host memory of one applied plan.

    Args:
        host_memory: returns a stretch of it.
        most_bytes: the bytes that the plan needs, which are taken at once; None if nobody knows: then it grows.

    Attributes:
        taken_bytes: bytes of the values that are in it now.
        most_taken_bytes: the most that they have been.
    """

    def __init__(self, host_memory: Callable[[int], torch.Tensor], most_bytes: int | None) -> None:
        self._host_memory = host_memory
        self._grows = most_bytes is None
        self._slabs: list[_Slab] = []
        self.taken_bytes = self.most_taken_bytes = 0
        if most_bytes:
            self._add_slab(most_bytes)

    def take(self, nbytes: int) -> Slot | None:
        """Return a slot; None if there is no room.

        Raises:
            OffloadError: the pool would have to grow, and cannot.
        """
        found = self._find(nbytes)
        if found is None and self._grows:
            self._add_slab(max(nbytes, _FIRST_SLAB_BYTES, sum(len(slab.memory) for slab in self._slabs)))
            found = self._find(nbytes)
        if found is not None:
            self.taken_bytes += nbytes
            self.most_taken_bytes = max(self.most_taken_bytes, self.taken_bytes)
        return found

    def _find(self, nbytes: int) -> Slot | None:
        for number, slab in enumerate(self._slabs):
            begin = slab.slots.take(nbytes)
            if begin is not None:
                end = begin + nbytes
                overlapping = [(b, e) for b, e, _ in slab.reading if b < end and begin < e]
                readers = [ticket for b, e, ticket in slab.reading if b < end and begin < e]
                slab.reading = [entry for entry in slab.reading if entry[:2] not in overlapping]
                return Slot(slab.memory[begin:end], readers, number, begin)
        return None

    def give_back(self, slot: Slot, reader: Any = None) -> None:
        """Take a slot back, which a copy may still read."""
        slab = self._slabs[slot.slab]
        slab.slots.give_back(slot.begin)
        self.taken_bytes -= len(slot.memory)
        if reader is not None:
            slab.reading.append((slot.begin, slot.begin + len(slot.memory), reader))

    def _add_slab(self, nbytes: int) -> None:
        self._slabs.append(_Slab(self._host_memory(nbytes), SlotList(nbytes), []))
