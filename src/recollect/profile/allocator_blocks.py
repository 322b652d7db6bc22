"""The sizes in which a device's allocator hands out memory. Imports no torch."""

from __future__ import annotations

# The CUDA caching allocator hands out multiples of this (PYTORCH_NO_CUDA_MEMORY_CACHING unset).
_CUDA_BLOCK_BYTES = 512


def block_bytes(nbytes: int, device: str) -> int:
    """Return what so many bytes take on a device: on CUDA the next multiple of 512.

    Args:
        nbytes: as asked for.
        device: "cpu", "cuda", "cuda:1", ...

    Example:
        >>> block_bytes(5, "cuda:0"), block_bytes(5, "cpu")
        (512, 5)
    """
    if not device.startswith("cuda"):
        return nbytes
    return -(-nbytes // _CUDA_BLOCK_BYTES) * _CUDA_BLOCK_BYTES
