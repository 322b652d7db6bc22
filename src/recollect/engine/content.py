"""Compares the content of tensors, in three ways at three prices.

`has_same_bits` compares two existing tensors. The others compare with an earlier note, to tell whether something has
written to a tensor in a way that raises no version: through `.data`, through NumPy, or in a foreign kernel. `checksums` reads
all of it, on any device. `glance_at` takes a microsecond, so it looks only at memory that is quick to read: small tensors on
the CPU (biases, scales, buffers), and memory that is not PyTorch's own (NumPy's, a data loader's).
"""

import ctypes
from collections.abc import Sequence

import torch
from torch.nn import Parameter

from recollect._torch_private import disable_torch_dispatch
from recollect.tensors import inner_tensors

_SMALL_BYTES = 4096

# Up to this size, holding the bytes is cheaper than hashing them.
_TINY_BYTES = 1024

# In foreign memory larger than twice this, only the beginning and the end are compared.
_PART_BYTES = 32 * 1024

# Of a checksum: the product of a chunk with its weights is the only memory that it needs.
_CHUNK_BYTES = 1 << 16


def has_same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors agree in every bit: NaN equals itself, and -0.0 differs from 0.0.

    Sparse tensors are compared after their entries have been added up; wrapper subclasses by the tensors they hold.

    Example:
        >>> import torch
        >>> has_same_bits(torch.tensor(float("nan")), torch.tensor(float("nan")))
        True
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
    bits = [t.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
    return torch.equal(*bits)


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


def glance_at(tensor: torch.Tensor) -> bytes | int | None:
    """Return something that tells a tensor's content from others; None if the content is not read.

    Example:
        >>> bias = torch.zeros(4)
        >>> before = glance_at(bias)
        >>> bias.data.add_(1)
        tensor([1., 1., 1., 1.])
        >>> glance_at(bias) == before
        False
    """
    if not tensor.is_cpu or (type(tensor) is not torch.Tensor and type(tensor) is not Parameter):
        return None
    if tensor.layout is not torch.strided:
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
