"""Lays out the results of traced ops as their kernels do, since functions for fake tensors may be wrong.

PyTorch computes an op's results on fake tensors with Python functions, some of which differ from the kernels in the strides of
results, for arguments that are not contiguous, or in their types, for arguments of several types. Autograd asks strides: with
other strides it runs other ops. So such an op runs once, on zeros: as many as in backward, or few; and they are freed at once.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import torch

from recollect._torch_private import tree_flatten, tree_map, unset_fake_temporarily
from recollect.engine.facts import OpFacts
from recollect.tensors import tensors_in

_aten = torch.ops.aten
# Their results are contiguous, whatever their arguments are.
_PRODUCTS: Final = frozenset({"mm", "bmm", "addmm", "baddbmm", "dot", "mv"})

# The strides of dimensions of size 1 decide whether an image, or a video, counts as channels last. These views set them.
_IMAGE_DIMS: Final = (4, 5)
_VIEWS: Final = frozenset({"view", "_unsafe_view", "_reshape_alias"})

_Layout: TypeAlias = tuple[torch.Size, tuple[int, ...], torch.dtype]

# The layouts of an op's results, for arguments of the same layouts.
_known: dict[Any, list[_Layout] | None] = {}


def laid_out(func: Any, facts: OpFacts, args: Any, kwargs: Any, output: Any) -> Any:
    """Return the fake results of an op, with the strides and types that its kernel gives them."""
    read, made = tensors_in((args, kwargs)), tensors_in(output)
    is_view = facts.is_view and facts.name in _VIEWS and 1 in made[0].shape
    if func.namespace != "aten" or not made or facts.writes or facts.is_random or facts.name in _PRODUCTS:
        return output
    if facts.is_view and not is_view:
        return output
    # As statistics of a norm in 16 bits with weights in 32.
    is_mixed = len(made) > 1 and len({tensor.dtype for tensor in read if tensor.is_floating_point()}) > 1
    is_known = not is_mixed and all(one.layout is torch.strided and _is_usual(one) for one in (*read, *made))
    if is_known or not all(_is_plain(tensor) for tensor in read):
        return output
    leaves, tree = tree_flatten((args, kwargs))
    key = func, tree, tuple(_signature(leaf) for leaf in leaves)
    if key not in _known:
        _known[key] = _run_on_zeros(func, args, kwargs)
    real = _known[key]
    if real is None or [shape for shape, *_ in real] != [tensor.shape for tensor in made]:
        return output
    layouts = iter(real)
    if is_view:
        return output if output.stride() == real[0][1] else args[0].as_strided(*real[0][:2], args[0].storage_offset())

    def corrected(result: Any) -> Any:
        if not isinstance(result, torch.Tensor):
            return result
        shape, stride, dtype = next(layouts)
        is_right = (stride, dtype) == (result.stride(), result.dtype)
        return result if is_right else result.new_empty_strided(shape, stride, dtype=dtype)

    return tree_map(corrected, output)


def _run_on_zeros(func: Any, args: Any, kwargs: Any, *, may_be_small: bool = True) -> list[_Layout] | None:
    """Return the layouts of an op's results; None if it cannot run on zeros: the fake tensors' layouts are then used.

    Where an op works element by element, the order of strides and sizes decides, and it runs on few elements with the same.
    """
    sizes = sorted({size for tensor in tensors_in((args, kwargs)) for size in tensor.shape})
    is_small = may_be_small and torch.Tag.pointwise in func.tags and min(sizes, default=1) > 1
    small = {size: number for number, size in enumerate(sizes, 2)} if is_small else dict(zip(sizes, sizes, strict=True))
    zeros = partial(_zeros, small)
    try:
        with unset_fake_temporarily(), torch.no_grad():
            found = tensors_in(func(*tree_map(zeros, args), **tree_map(zeros, kwargs)))
            if not is_small:
                return [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in found]
            if any(tensor.stride() != _dense(tensor.shape, tensor.stride()) for tensor in found):
                return _run_on_zeros(func, args, kwargs, may_be_small=False)
            whole = {number: size for size, number in small.items()}
            shapes = [torch.Size(whole[size] for size in tensor.shape) for tensor in found]
            return [(shape, _dense(shape, one.stride()), one.dtype) for shape, one in zip(shapes, found, strict=True)]
    except Exception:
        return None


def _is_usual(tensor: torch.Tensor) -> bool:
    """Whether a tensor is contiguous, and does not count as channels last by the strides of dimensions of size 1."""
    if not tensor.is_contiguous() or tensor.dim() not in _IMAGE_DIMS or 1 not in tensor.shape:
        return tensor.is_contiguous()
    return tensor.stride() == torch.empty(tensor.shape, device="meta").stride()


def _dense(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor without gaps, in the order of others."""
    found, numel = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=stride.__getitem__):
        found[dim], numel = numel, numel * shape[dim]
    return tuple(found)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided and tensor.device.type != "meta" and not tensor.is_conj() and not tensor.is_neg()
    )


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device
    return type(leaf), repr(leaf)


def _zeros(sizes: Mapping[int, int], leaf: Any) -> Any:
    """Return zeros in the layout of a tensor, with other sizes."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    shape = [sizes[size] for size in leaf.shape]
    numel = (
        1 + sum((size - 1) * stride for size, stride in zip(shape, leaf.stride(), strict=True)) if leaf.numel() else 0
    )
    return torch.zeros(numel, dtype=leaf.dtype, device=leaf.device).as_strided(shape, leaf.stride())
