"""What a CUDA device holds besides the tensors of a step, which the budget of the step has to hold as well.

The peak that counts there is `torch.cuda.max_memory_allocated`, and it counts everything that this process has on the device:
models that are no part of the step, the workspaces that cuBLAS takes through PyTorch's allocator when a thread first
multiplies matrices, and the rounding of each block. On the CPU nobody counts, and all of this is 0.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch

from recollect.measuring.meter import storage_bytes

__all__ = ["OtherAllocations", "allocated_bytes", "empty_cache", "memory_bytes", "other_bytes"]


def memory_bytes(device: torch.device) -> int:
    """Return the size of a CUDA device's memory; 0 for other devices."""
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else 0


def allocated_bytes(device: torch.device) -> int:
    """Return what this process has on a CUDA device, garbage collected before; 0 for other devices."""
    if device.type != "cuda":
        return 0
    gc.collect()
    return torch.cuda.memory_allocated(device)


def other_bytes(device: torch.device, tensors: Iterable[torch.Tensor]) -> int:
    """Return what this process has on a CUDA device besides some tensors; 0 for other devices."""
    if device.type != "cuda":
        return 0
    return max(0, allocated_bytes(device) - storage_bytes(t for t in tensors if t.device == device))


def empty_cache(device: torch.device) -> None:
    """Give cached blocks back to the device, so that what is reserved afterwards is reserved for what runs then."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


class OtherAllocations:
    """Finds out what a CUDA device holds besides the tensors of a step while the step runs.

    That is what it held besides them before the first run, and what runs leave behind, as libraries' workspaces.

    Args:
        device: where the step runs.
        tensors: all tensors of the step that are there before it: parameters, gradients, buffers, optimizer state, batch.
    """

    def __init__(self, device: torch.device, tensors: Iterable[torch.Tensor]) -> None:
        self._device = device
        self._before_bytes = other_bytes(device, tensors)
        self._first_bytes: int | None = None

    def before_step(self) -> int:
        """Return the bytes; call it just before each run of the step, with the same tensors in memory each time."""
        now_bytes = allocated_bytes(self._device)
        if self._first_bytes is None:
            self._first_bytes = now_bytes
        return self._before_bytes + max(0, now_bytes - self._first_bytes)
