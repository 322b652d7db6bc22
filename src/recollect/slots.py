"""Deals out room in host memory to offloaded values, by numbers alone.

The engine places copies where this says, and the simulator asks it in the same order, so that the engine needs exactly as much
host memory as was predicted. This module knows nothing of PyTorch.
"""

from __future__ import annotations

from bisect import bisect_left, insort

SLOT_ALIGNMENT = 64
"""Slots begin at multiples of so many bytes."""


class SlotList:
    """Slots in one stretch of memory: each gets the first hole that it fits in.

    Args:
        most_bytes: length of the stretch; None for as much as it takes.

    Attributes:
        end_bytes: where the slots that there have been end: what the stretch needs to be at least.

    Example:
        >>> slots = SlotList(256)
        >>> [slots.take(100), slots.take(100), slots.take(100)]
        [0, 128, None]
        >>> slots.give_back(0)
        >>> slots.take(64), slots.take(64), slots.end_bytes
        (0, 64, 256)
    """

    def __init__(self, most_bytes: int | None = None) -> None:
        self._most_bytes = most_bytes
        # Begin and end of each slot, in order.
        self._taken: list[tuple[int, int]] = []
        self.end_bytes = 0

    def take(self, nbytes: int) -> int | None:
        """Return where a new slot begins; None if there is no room."""
        size = -(-nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        begin = 0
        for taken, end in self._taken:
            if taken - begin >= size:
                break
            begin = end
        if self._most_bytes is not None and begin + size > self._most_bytes:
            return None
        insort(self._taken, (begin, begin + size))
        self.end_bytes = max(self.end_bytes, begin + size)
        return begin

    def give_back(self, begin: int) -> None:
        """Free the slot that begins there."""
        del self._taken[bisect_left(self._taken, (begin, 0))]

    def __len__(self) -> int:
        return len(self._taken)
