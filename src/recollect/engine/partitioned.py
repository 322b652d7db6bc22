"""Parameters of which each rank has a part, as under DeepSpeed's ZeRO-3: whole while a module runs, and then no more.

What runs again in backward, in between, gathers them for itself, into memory of its own: DeepSpeed may be about to gather the
same ones for a module, and counts on what it finds.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import nn


def is_partitioned(tensor: Any) -> TypeGuard[nn.Parameter]:
    """Whether a tensor is a parameter of which this rank has a part."""
    return isinstance(tensor, nn.Parameter) and hasattr(tensor, "ds_tensor")


def can_be_gathered(parameter: Any) -> bool:
    """Whether the parts add up to the parameter: not offloaded to the host, quantized or of another type."""
    part = parameter.ds_tensor
    is_plain = not hasattr(part, "ds_quant_scale") and getattr(part, "final_location", None) is None
    return bool(is_plain and part.device == parameter.device and part.dtype == parameter.dtype)


def group_of(parameter: Any) -> str:
    """Return the name of the group of ranks that have the parts; empty if this one has all."""
    group = parameter.ds_process_group
    return "" if torch.distributed.get_world_size(group) == 1 else str(group.group_name)


def gathered(parameter: Any) -> torch.Tensor:
    """Return the whole parameter: what it holds if it is whole just now, else a copy, for which all ranks have to come."""
    held: torch.Tensor = parameter.detach()
    if parameter.ds_status.name == "AVAILABLE":
        return held
    part: torch.Tensor = parameter.ds_tensor.detach()
    size = torch.distributed.get_world_size(parameter.ds_process_group)
    whole = part.new_empty(size * part.numel())
    torch.distributed.all_gather_into_tensor(whole, part, group=parameter.ds_process_group)
    return whole[: parameter.ds_numel].view(parameter.ds_shape)
