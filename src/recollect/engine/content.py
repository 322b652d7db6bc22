"""Compares the content of tensors in three ways, at three costs.

`has_same_bits` compares two existing tensors. The others compare with an earlier note, to tell whether something has
written to a tensor without raising its version: through `.data`, through NumPy, or in a foreign kernel. `checksums` reads
all of it, on any device. `glance_at` takes a microsecond, so it looks only at memory that is quick to read: small tensors on
the CPU (biases, scales, buffers), and memory that is not PyTorch's own (NumPy's, a data loader's).
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import Parameter

from recollect._torch_private import disable_torch_dispatch
from recollect.tensors import has_strides, inner_tensors

_SMALL_BYTES = 4096

# Up to this size, holding the bytes is cheaper than hashing them.
_TINY_BYTES = 1024

# In foreign memory larger than twice this, only the beginning and the end are compared.
_PART_BYTES = 32 * 1024

# Of the table that a checksum sums up.
_COLUMNS = 1024
_CHUNK = 1 << 19


def has_same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors agree in every bit: NaN equals itself, and -0.0 differs from 0.0.

    Sparse tensors are compared after their entries have been added up; wrapper subclasses by the tensors they hold.
    """
    inner, others = inner_tensors(left), inner_tensors(right)
    if (inner or others) and type(left) is not type(right):
        return False
    if left.dtype != right.dtype or left.shape != right.shape or left.layout != right.layout:
        return False
    if inner:
        return all(has_same_bits(one, other) for one, other in zip(inner, others, strict=True))
    left, right = left.detach(), right.detach()
    if left.layout is torch.sparse_coo:
        left, right = left.coalesce(), right.coalesce()
        return has_same_bits(left.indices(), right.indices()) and has_same_bits(left.values(), right.values())
    if left.layout is not torch.strided:
        return has_same_bits(left.to_dense(), right.to_dense())
    if left.is_quantized:
        return torch.equal(left, right)  # Integers and their scale; bytes of it cannot be viewed.
    plain = [t.resolve_conj().resolve_neg().contiguous() for t in (left, right)]
    # The stride of a single element may be anything, and then it cannot be viewed as bytes.
    bits = [t.as_strided((t.numel(),), (1,)).view(torch.uint8) for t in plain]
    return torch.equal(*bits)


def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a number for the content of each tensor's storage, which also depends on the order of the bytes.

    Example:
        >>> import torch
        >>> one, other = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 1.0, 3.0])
        >>> first, second, third = checksums([one, other, one.clone()])
        >>> first == third, first == second
        (True, False)
    """
    return [checksum(tensor.untyped_storage()) for tensor in tensors]


def checksum(storage: torch.UntypedStorage, begin: int = 0, end: int | None = None) -> int:
    """Return a number for the bytes of a storage, or for a part of them; 0 on meta.

    Numbers are summed along the rows and along the columns of a table, and the sums weighted, which also tells swapped
    ones apart. On the CPU nothing is allocated by PyTorch, whose peaks are measured; elsewhere less than 64 KiB.
    """
    if storage.device.type == "meta" or not _has_memory(storage):
        return 0
    num_bytes = (storage.nbytes() if end is None else end) - begin
    if storage.device.type == "cpu":
        memory = (ctypes.c_uint8 * num_bytes).from_address(storage.data_ptr() + begin)
        words = np.frombuffer(memoryview(memory), dtype=np.int64, count=num_bytes // 8)
        rest = np.frombuffer(memoryview(memory), dtype=np.uint8)[len(words) * 8 :]
        # As a signed number of 64 bits, like the sums.
        return (_sum_on_the_cpu(words) * 31 + _sum_on_the_cpu(rest) + 2**63) % 2**64 - 2**63
    with disable_torch_dispatch(), torch.no_grad():
        content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, begin, (num_bytes,), (1,))
        if num_bytes % 8 == 0 and content.data_ptr() % 8 == 0:
            content = content.view(torch.int64)
        total = torch.zeros((), dtype=torch.int64, device=storage.device)
        for chunk in content.split(_CHUNK):
            total = total * 31 + _sum_on_a_device(chunk)
        return int(total)


def _sum_on_the_cpu(content: np.ndarray[Any, Any]) -> int:
    whole = len(content) // _COLUMNS * _COLUMNS
    table = content[:whole].reshape(-1, _COLUMNS)
    sums = np.concatenate(
        [table.sum(0, dtype=np.int64), table.sum(1, dtype=np.int64), content[whole:].astype(np.int64)]
    )
    # Odd numbers, by which a product modulo 2^64 loses no bit.
    return int((sums * np.arange(1, 2 * len(sums), 2, dtype=np.int64)).sum())


def _sum_on_a_device(content: torch.Tensor) -> torch.Tensor:
    whole = len(content) // _COLUMNS * _COLUMNS
    table = content[:whole].view(-1, _COLUMNS)
    sums = torch.cat([table.sum(0), table.sum(1), content[whole:].to(torch.int64)])
    return (sums * torch.arange(1, 2 * len(sums), 2, device=content.device)).sum()


def _has_memory(storage: torch.UntypedStorage) -> bool:
    """Whether there is something at a storage's address: not for the zeros that transforms make, which have sizes only."""
    try:
        return storage.data_ptr() != 0
    except RuntimeError:
        return False


def glance_at(tensor: torch.Tensor) -> bytes | int | None:
    """Return something that tells a tensor's content from others; None if the content is not read."""
    if not tensor.is_cpu or (type(tensor) is not torch.Tensor and type(tensor) is not Parameter):
        return None
    if not has_strides(tensor):
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
