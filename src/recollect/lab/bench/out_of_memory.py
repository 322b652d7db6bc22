"""Recognise out-of-memory errors of every device."""

from __future__ import annotations

import torch

__all__ = ["is_out_of_memory"]

# PyTorch's CPU allocator raises a plain RuntimeError with this text.
_CPU_ALLOCATOR = "can't allocate memory"


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
