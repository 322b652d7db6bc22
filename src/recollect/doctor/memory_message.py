"""`MemoryMessage`: the numbers in PyTorch's message that the device is out of memory, of versions 1.x to 2.13."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["MemoryMessage"]

_AMOUNT = r"(\d+(?:\.\d+)?) (GiB|MiB|KiB|bytes)"
_SCALES = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
# 2.x ("capacty" in 2.1), then 1.x.
_TRIED = re.compile(rf"Tried to allocate {_AMOUNT}")
_CAPACITY = re.compile(rf"total capaci?ty of {_AMOUNT}|{_AMOUNT} total capacity")
_FREE = re.compile(rf"of which {_AMOUNT} is free|{_AMOUNT} free;")
_ALLOCATED = re.compile(rf"{_AMOUNT} is allocated by PyTorch|{_AMOUNT} already allocated")
_UNALLOCATED = re.compile(rf"{_AMOUNT} is reserved by PyTorch but unallocated")
_RESERVED = re.compile(rf"{_AMOUNT} reserved in total by PyTorch")
_PROCESS = re.compile(rf"Process (\d+) has {_AMOUNT} memory in use")
_THIS = re.compile(rf"this process has {_AMOUNT} memory in use")


@dataclass(frozen=True, slots=True)
class MemoryMessage:
    """The message, in bytes; None where it does not say.

    Attributes:
        tried_bytes: what could not be allocated.
        capacity_bytes: of the device.
        free_bytes: on the device, belonging to no process.
        allocated_bytes: in tensors of this process.
        unallocated_bytes: held by this process's allocator, in no tensor.
        other_processes: what other processes hold, by process id.
    """

    tried_bytes: int
    capacity_bytes: int | None
    free_bytes: int | None
    allocated_bytes: int | None
    unallocated_bytes: int | None
    other_processes: dict[int, int]

    @classmethod
    def of(cls, line: str) -> MemoryMessage | None:
        """Read a message; None if the line is none.

        Example:
            >>> message = MemoryMessage.of(
            ...     "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB of which "
            ...     "1.00 GiB is free."
            ... )
            >>> message.tried_bytes - message.free_bytes == 2**30
            True
        """
        tried = _bytes(_TRIED, line)
        if tried is None:
            return None
        capacity = _bytes(_CAPACITY, line)
        allocated = _bytes(_ALLOCATED, line)
        unallocated = _bytes(_UNALLOCATED, line)
        reserved = _bytes(_RESERVED, line)
        if unallocated is None and reserved is not None and allocated is not None:
            unallocated = max(reserved - allocated, 0)
        return cls(
            tried,
            capacity,
            _bytes(_FREE, line),
            allocated,
            unallocated,
            _others(line, allocated, unallocated, capacity),
        )

    @property
    def room_bytes(self) -> int | None:
        """What is in no tensor of any process."""
        if self.free_bytes is None or self.unallocated_bytes is None:
            return None
        return self.free_bytes + self.unallocated_bytes


def _bytes(pattern: re.Pattern[str], line: str) -> int | None:
    found = pattern.search(line)
    if found is None:
        return None
    number, unit = (group for group in found.groups() if group is not None)
    return round(float(number) * _SCALES[unit])


def _others(line: str, allocated: int | None, unallocated: int | None, capacity: int | None) -> dict[int, int]:
    named = {int(m[1]): round(float(m[2]) * _SCALES[m[3]]) for m in _PROCESS.finditer(line)}
    if capacity is not None:
        named = {pid: size for pid, size in named.items() if size <= capacity}
    if not _THIS.search(line) and allocated is not None:
        # In a container this process goes by its number, too: it is the one that holds what PyTorch holds, and more.
        held = allocated + (unallocated or 0)
        mine = [pid for pid, size in named.items() if size >= held * 0.99]
        if mine:
            del named[min(mine, key=lambda pid: named[pid])]
    return named
