"""Measure the memory in use now, and a CUDA device's memory besides a step's tensors, as the step's budget counts it.

The peak on CUDA is `torch.cuda.max_memory_allocated`, which counts everything that this process has on the device: models
outside the step, the workspaces that cuBLAS allocates through PyTorch when a thread first multiplies matrices, and the
rounding of each block. On the CPU nothing is counted, and all of these are 0 except `held_now`.
"""

import ctypes
import gc
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache

import torch

from recollect.measuring.deaths import allocated_storages
from recollect.measuring.meter import storage_bytes

# PyTorch's CPU allocator raises a plain RuntimeError with this text.
_CPU_ALLOCATOR = "can't allocate memory"


def memory_bytes(device: torch.device) -> int:
    """Return the size of a CUDA device's memory; 0 for other devices."""
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else 0


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes of this process on a CUDA device, after garbage collection; 0 for other devices."""
    if device.type != "cuda":
        return 0
    gc.collect()
    return torch.cuda.memory_allocated(device)


def other_bytes(device: torch.device, tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of this process on a CUDA device, minus the bytes of some tensors; 0 for other devices.

    Sparse tensors have no storage to subtract, and count among the rest.
    """
    if device.type != "cuda":
        return 0
    known = (t for t in tensors if t.device == device and t.layout is torch.strided)
    return max(0, allocated_bytes(device) - storage_bytes(known))


def empty_cache(device: torch.device) -> None:
    """Return cached blocks to the device: bytes reserved later are then due to later work."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


class _MallInfo(ctypes.Structure):
    """The result of glibc's `mallinfo2`; see its manual page."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    )


def held_now(device: torch.device) -> int | None:
    """Return the bytes in use, which the allocator itself tells in microseconds; None if it does not.

    On the CPU these are all bytes from the C library, also of other objects than tensors: only differences are meaningful.
    None also on other devices than CUDA, and the CPU on Linux with glibc.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    read = _mallinfo() if device.type == "cpu" else None
    if read is None:
        return None
    info = read()
    return int(info.uordblks + info.hblkhd)


def tensor_bytes(device: torch.device, *, enough_bytes: int = 0) -> int:
    """Return the bytes of all tensors; on the CPU of those that Python can reach, after a look at each object there is.

    Garbage in cycles counts if they take no more than `enough_bytes` with it; else it is collected first.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    with_garbage = sum(storage.nbytes() for storage in allocated_storages(collects=False))
    return with_garbage if with_garbage <= enough_bytes else sum(storage.nbytes() for storage in allocated_storages())


@lru_cache(maxsize=1)
def _mallinfo() -> Callable[[], _MallInfo] | None:
    """Return the function; None without it, or if PyTorch uses an allocator other than the C library's."""
    function = getattr(ctypes.CDLL(None), "mallinfo2", None) if sys.platform == "linux" else None
    if function is None:
        return None
    function.restype = _MallInfo
    before = function().uordblks + function().hblkhd
    probe = torch.empty(1 << 12, dtype=torch.uint8)
    after = function().uordblks + function().hblkhd
    return function if after - before >= probe.nbytes else None


def is_out_of_memory(error: BaseException | None) -> bool:
    """Tell whether an error, or one of its causes, reports a lack of memory.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes do not match"))
        (True, False)
    """
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or _CPU_ALLOCATOR in str(error):
            return True
        error = error.__cause__
    return False
