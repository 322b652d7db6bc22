"""Tells whether what a recipe reads has changed in a way that raises no version: through `.data`, or through NumPy.

Only what can be read in a microsecond is compared: small tensors on the CPU (biases, scales, buffers) and memory that is not
PyTorch's own (NumPy's, a data loader's). What was written to in between must differ in its bytes; nothing else is asked.
"""

from __future__ import annotations

import ctypes

import torch
from torch.nn import Parameter

__all__ = ["content_of"]

_SMALL_BYTES = 4096

# Up to this size, holding the bytes is cheaper than hashing them.
_TINY_BYTES = 1024

# Of foreign memory that is larger than twice this, the beginning and the end are compared.
_PART_BYTES = 32 * 1024


def content_of(tensor: torch.Tensor) -> bytes | int | None:
    """Return something that tells a tensor's content from others; None if it is not looked at.

    Example:
        >>> bias = torch.zeros(4)
        >>> before = content_of(bias)
        >>> bias.data.add_(1)
        tensor([1., 1., 1., 1.])
        >>> content_of(bias) == before
        False
    """
    if not tensor.is_cpu or (type(tensor) is not torch.Tensor and type(tensor) is not Parameter):
        return None
    nbytes = tensor.nbytes
    if not nbytes or (nbytes > _SMALL_BYTES and tensor.untyped_storage().resizable()) or not tensor.is_contiguous():
        return None
    address = tensor.data_ptr()
    if not address:
        return None
    if nbytes <= _TINY_BYTES:
        return ctypes.string_at(address, nbytes)
    if nbytes <= 2 * _PART_BYTES:
        return hash(ctypes.string_at(address, nbytes))
    end = ctypes.string_at(address + nbytes - _PART_BYTES, _PART_BYTES)
    return hash((ctypes.string_at(address, _PART_BYTES), end))
