"""Read how much memory is in use now from the allocator itself, in microseconds."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import lru_cache

import torch

__all__ = ["held_now"]


class _MallInfo(ctypes.Structure):
    """What glibc's `mallinfo2` returns; see its manual page."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    )


def held_now(device: torch.device) -> int | None:
    """Return the bytes in use; None where nothing tells.

    On the CPU these are all that the process has from the C library, of which PyTorch's tensors are a part: differences count.

    Args:
        device: CUDA, or the CPU on Linux with glibc.

    Example:
        >>> import torch
        >>> before = held_now(torch.device("cpu"))
        >>> kept = torch.empty(1 << 20)
        >>> before is None or held_now(torch.device("cpu")) - before > 4_000_000
        True
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    read = _mallinfo() if device.type == "cpu" else None
    if read is None:
        return None
    info = read()
    return int(info.uordblks + info.hblkhd)


@lru_cache(maxsize=1)
def _mallinfo() -> Callable[[], _MallInfo] | None:
    """Return the function; None without it, or where another allocator than the C library's serves PyTorch."""
    function = getattr(ctypes.CDLL(None), "mallinfo2", None) if sys.platform == "linux" else None
    if function is None:
        return None
    function.restype = _MallInfo
    before = function().uordblks + function().hblkhd
    probe = torch.empty(1 << 18, dtype=torch.uint8)
    after = function().uordblks + function().hblkhd
    return function if after - before >= probe.nbytes else None
