"""Describe a call of the model by what it gets, and by what its parameters hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from recollect._torch_private import tree_leaves
from recollect.attaching.step_shape import Call

__all__ = ["describe_call"]


def describe_call(
    path: str,
    module: nn.Module,
    args: Any,
    kwargs: Any,
    parameters: Iterable[torch.Tensor],
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
        parameters: of the whole model.
        device_type: where it runs.
        is_open: an earlier call still waits for its backward.
    """
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    trained = 0
    has_gradients = False
    for number, parameter in enumerate(parameters):
        trained |= parameter.requires_grad << number
        has_gradients |= parameter.grad is not None
    return Call(
        entry=path,
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        context=(tuple(tensor.dtype for tensor in tensors), module.training, autocast),
        trained=trained,
        has_gradients=has_gradients,
        is_open=is_open,
    )
