"""Measure what a CUDA device holds besides a step's tensors, since it counts toward the step's budget.

The peak on CUDA is `torch.cuda.max_memory_allocated`, which counts everything that this process has on the device: models
outside the step, the workspaces that cuBLAS allocates through PyTorch when a thread first multiplies matrices, and the
rounding of each block. On the CPU nothing is counted, and all of this is 0.
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
    """Return the bytes of this process on a CUDA device, after garbage collection; 0 for other devices."""
    if device.type != "cuda":
        return 0
    gc.collect()
    return torch.cuda.memory_allocated(device)


def other_bytes(device: torch.device, tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of this process on a CUDA device, minus those of some tensors; 0 for other devices.

    Sparse tensors have no storage to subtract, and count among the rest.
    """
    if device.type != "cuda":
        return 0
    known = (t for t in tensors if t.device == device and t.layout is torch.strided)
    return max(0, allocated_bytes(device) - storage_bytes(known))


def empty_cache(device: torch.device) -> None:
    """Return cached blocks to the device, so that later reserved bytes are due to what runs later."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


class OtherAllocations:
    """Measures what a CUDA device holds besides a step's tensors while the step runs.

    That is what it held before the first run, plus what runs leave behind, such as the workspaces of libraries.

    Args:
        device: where the step runs.
        tensors: the step's tensors that exist before it: parameters, gradients, buffers, optimizer state, batch.
    """

    def __init__(self, device: torch.device, tensors: Iterable[torch.Tensor]) -> None:
        self._device = device
        self._before_bytes = other_bytes(device, tensors)
        self._first_bytes: int | None = None

    def before_step(self) -> int:
        """Return the bytes; call this just before each run of the step, always with the same tensors in memory."""
        now_bytes = allocated_bytes(self._device)
        if self._first_bytes is None:
            self._first_bytes = now_bytes
        return self._before_bytes + max(0, now_bytes - self._first_bytes)
