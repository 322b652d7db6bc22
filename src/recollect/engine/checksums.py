"""Sums up the bytes of tensors, to tell whether something wrote to them out of sight."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from recollect._torch_private import disable_torch_dispatch

__all__ = ["checksums"]

# A chunk's product with its weights is the only memory that this needs.
_CHUNK_BYTES = 1 << 16


def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a number for the content of each tensor's storage, which also depends on the order of the bytes.

    Example:
        >>> import torch
        >>> one, other = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
        >>> first, second, third = checksums([one, other, one.clone()])
        >>> first == third, first == second
        (True, False)
    """
    with disable_torch_dispatch(), torch.no_grad():
        return [_checksum(tensor) for tensor in tensors]


def _checksum(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return 0
    content = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
    if storage.nbytes() % 8 == 0 and storage.data_ptr() % 8 == 0:
        content = content.view(torch.int64)
    size = _CHUNK_BYTES // content.element_size()
    # Odd numbers, by which a product modulo 2^64 loses no bit.
    weights = torch.arange(1, 2 * min(size, len(content)), 2, dtype=torch.int64, device=tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in content.split(size):
        total = total * 31 + (chunk * weights[: len(chunk)]).sum()
    return int(total)
