"""Deals out slots in host memory."""

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from recollect.slots import SlotList

# Where the need is unknown: the size of the first slab; each later one is as large as all before it.
_FIRST_SLAB_BYTES = 16 * 2**20


@dataclass(slots=True, eq=False)
class Slot:
    """Room for one value."""

    memory: torch.Tensor
    nbytes: int
    copies: list[Any]
    """Tickets of the last copies from and to them, which later copies wait for."""
    slab: int
    begin: int
    """Where it begins in its slab."""


_Copied = tuple[int, int, list[Any]]
"""Begin and end of the free part of a slot, and tickets of copies that may still read or write there."""


@dataclass(slots=True, eq=False)
class _Slab:
    memory: torch.Tensor
    slots: SlotList
    # Slots that were given back, in order.
    copies: list[_Copied]


class HostPool:
    """Host memory of one applied plan.

    The bytes that the plan needs are taken at once; if they are unknown, it grows.
    """

    def __init__(self, host_memory: Callable[[int], torch.Tensor], most_bytes: int | None) -> None:
        self._host_memory = host_memory
        self._grows = most_bytes is None
        self._slabs: list[_Slab] = []
        self.taken_bytes = self.most_taken_bytes = 0
        if most_bytes:
            self._add_slab(most_bytes)

    def take(self, nbytes: int) -> Slot | None:
        """Return a slot of a byte or more; None if there is no room."""
        found = self._find(nbytes)
        if found is None and self._grows:
            self._add_slab(max(nbytes, _FIRST_SLAB_BYTES, sum(len(slab.memory) for slab in self._slabs)))
            found = self._find(nbytes)
        if found is not None:
            self.taken_bytes += nbytes
            if self.taken_bytes > self.most_taken_bytes:
                self.most_taken_bytes = self.taken_bytes
        return found

    def _find(self, nbytes: int) -> Slot | None:
        for number, slab in enumerate(self._slabs):
            begin = slab.slots.take(nbytes)
            if begin is not None:
                end = begin + nbytes
                copies = _cut(slab.copies, begin, end)
                return Slot(slab.memory[begin:end], nbytes, copies, number, begin)
        return None

    def give_back(self, slot: Slot) -> None:
        """Take a slot back; its copies may still be running."""
        slab = self._slabs[slot.slab]
        slab.slots.give_back(slot.begin)
        self.taken_bytes -= slot.nbytes
        insort(slab.copies, (slot.begin, slot.begin + slot.nbytes, slot.copies))

    def _add_slab(self, nbytes: int) -> None:
        self._slabs.append(_Slab(self._host_memory(nbytes), SlotList(nbytes), []))


def _cut(copies: list[_Copied], begin: int, end: int) -> list[Any]:
    """Remove a stretch from those that copies read or write; return its tickets."""
    first = bisect_left(copies, (begin,))
    if first and copies[first - 1][1] > begin:
        first -= 1
    last = bisect_left(copies, (end,), lo=first)
    overlapping = copies[first:last]
    if not overlapping:
        return []
    before, after = overlapping[0], overlapping[-1]
    copies[first:last] = [
        *([(before[0], begin, before[2])] if before[0] < begin else []),
        *([(end, after[1], after[2])] if end < after[1] else []),
    ]
    return [ticket for *_, tickets in overlapping for ticket in tickets]
