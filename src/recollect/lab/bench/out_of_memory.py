"""What running out of memory looks like, by device."""

from __future__ import annotations

import torch

__all__ = ["is_out_of_memory"]

# What PyTorch's CPU allocator says, in a plain RuntimeError.
_CPU_ALLOCATOR = "can't allocate memory"


def is_out_of_memory(error: BaseException | None) -> bool:
    """Tell whether an error, or what it was raised from, says that there was not enough memory.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes do not match"))
        (True, False)
    """
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or _CPU_ALLOCATOR in str(error):
            return True
        error = error.__cause__
    return False
