"""Describe a call of the model by what it gets, and by what its parameters hold."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from operator import attrgetter
from typing import Any, Final

import torch
from torch import nn

from recollect._torch_private import tree_leaves
from recollect.attaching.step_shape import Call
from recollect.attaching.structure import Structure

# Numbers may count steps; what they change, the units and the allocator tell. What objects hold is not looked at.
_PLAIN: Final = frozenset({bool, str, type(None)})
_requires_grad = attrgetter("requires_grad")


def describe_call(
    path: str,
    module: nn.Module,
    args: Any,
    kwargs: Any,
    structure: Structure,
    device_type: str,
    *,
    is_open: bool,
) -> Call:
    """Return what tells which plan covers a call.

    Args:
        path: of the module that is called.
        module: that is called.
        args: what it gets.
        kwargs: the same.
        structure: of the whole model.
        device_type: where it runs.
        is_open: an earlier call still waits for its backward.
    """
    leaves = tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    return Call(
        entry=path,
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        context=(tuple(tensor.dtype for tensor in tensors), module.training, autocast, structure.version),
        arguments=tuple(_seen(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor)),
        trained=_bits(map(_requires_grad, structure.parameters)),
        traced=_bits(map(_requires_grad, tensors)),
        has_gradients=any(parameter.grad is not None for parameter in structure.parameters),
        is_open=is_open,
    )


def _seen(argument: Any) -> object:
    if type(argument) in _PLAIN or isinstance(argument, Enum):
        return argument
    return type(argument)


def _bits(flags: Iterable[bool]) -> int:
    # As bytes: to shift a number of hundreds of bits once for each takes several times as long.
    return int.from_bytes(bytes(flags), "little")
