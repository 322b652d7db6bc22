"""Gives out addresses, lowest first, for viewers that want some."""

from __future__ import annotations

from bisect import bisect_left, insort

_BASE = 1 << 40


class Arena:
    """One stretch of addresses, as long as it has to be; who asks gets the first gap that is large enough.

    Attributes:
        base: the first address.
        end: the address after the last that was ever given out.

    Example:
        >>> arena = Arena()
        >>> first, second = arena.take(8), arena.take(4)
        >>> arena.give_back(first, 8)
        >>> arena.take(6) == first, arena.take(6) == second + 4, arena.end - arena.base
        (True, True, 18)
    """

    def __init__(self) -> None:
        self.base = self.end = _BASE
        # The gaps below the end, as (address, bytes), by address; none touches another.
        self._gaps: list[tuple[int, int]] = []

    def take(self, nbytes: int) -> int:
        """Return the address of so many bytes."""
        for index, (address, free_bytes) in enumerate(self._gaps):
            if free_bytes >= nbytes:
                self._gaps[index : index + 1] = [(address + nbytes, free_bytes - nbytes)] if free_bytes > nbytes else []
                return address
        self.end += nbytes
        return self.end - nbytes

    def give_back(self, address: int, nbytes: int) -> None:
        """Take bytes back, to be given out again."""
        index = bisect_left(self._gaps, (address, 0))
        if index < len(self._gaps) and self._gaps[index][0] == address + nbytes:
            nbytes += self._gaps.pop(index)[1]
        if index and sum(self._gaps[index - 1]) == address:
            before, free_bytes = self._gaps.pop(index - 1)
            address, nbytes = before, nbytes + free_bytes
        insort(self._gaps, (address, nbytes))
