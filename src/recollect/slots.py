"""Allocates host memory for offloaded values, as plain numbers, and addresses for viewers that need them.

The engine places copies where this says, and the simulator asks it in the same order, so the engine needs exactly as much host
memory as was predicted. This module knows nothing of PyTorch.
"""

import math
from bisect import bisect_left

SLOT_ALIGNMENT = 64
"""Slots of copies begin at multiples of this many bytes."""


def slot_bytes(nbytes: int, alignment: int = SLOT_ALIGNMENT) -> int:
    return -(-nbytes // alignment) * alignment


class SlotList:
    """Slots in one stretch of memory: each gets the first hole that it fits in.

    Args:
        most_bytes: length of the stretch; None for any length.
        alignment: slots begin at multiples of this many bytes.

    Attributes:
        end_bytes: the end of all slots so far: the least size of the stretch.

    Example:
        >>> slots = SlotList(256)
        >>> [slots.take(100), slots.take(100), slots.take(100)]
        [0, 128, None]
        >>> slots.give_back(0)
        >>> slots.take(64), slots.take(64), slots.end_bytes
        (0, 64, 256)
    """

    def __init__(self, most_bytes: int | None = None, *, alignment: int = SLOT_ALIGNMENT) -> None:
        self._alignment = alignment
        # Begin and end of each hole, in order.
        self._holes: list[tuple[int, float]] = [(0, math.inf if most_bytes is None else most_bytes)]
        self._ends: dict[int, int] = {}
        self.end_bytes = 0

    def take(self, nbytes: int) -> int | None:
        """Return where a new slot of one byte or more begins; None if there is no room."""
        size = slot_bytes(nbytes, self._alignment)
        position = next((i for i, (begin, end) in enumerate(self._holes) if begin + size <= end), None)
        if position is None:
            return None
        begin, end = self._holes[position]
        if begin + size < end:
            self._holes[position] = begin + size, end
        else:
            del self._holes[position]
        self._ends[begin] = begin + size
        if begin + size > self.end_bytes:
            self.end_bytes = begin + size
        return begin

    def give_back(self, begin: int) -> None:
        end: float = self._ends.pop(begin)
        position = bisect_left(self._holes, (begin, 0))
        if position < len(self._holes) and self._holes[position][0] == end:
            end = self._holes.pop(position)[1]
        if position and self._holes[position - 1][1] == begin:
            position -= 1
            begin = self._holes.pop(position)[0]
        self._holes.insert(position, (begin, end))

    def __len__(self) -> int:
        return len(self._ends)
