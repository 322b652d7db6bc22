"""Tells how PyTorch spreads a model over processes; the private names for that, each with its reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "filled_storages",
    "fully_sharded_parameters",
    "is_checkpoint_wrapper",
    "is_data_parallel",
    "is_fully_sharded",
]


def is_checkpoint_wrapper(module: nn.Module) -> bool:
    """Whether torch's own activation checkpoint wrapper is around a module."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

    return isinstance(module, CheckpointWrapper)


def is_data_parallel(module: nn.Module) -> bool:
    """Whether a module is `DistributedDataParallel`, which awaits the hooks of its parameters after each forward."""
    return isinstance(module, DistributedDataParallel)


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 puts a module's parameters in place while it runs; without importing it."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def fully_sharded_parameters(model: nn.Module) -> dict[int, nn.Parameter]:
    """Return the parameters that FSDP2 shards, by `id`; those that it was told to ignore are no DTensors."""
    return {
        id(parameter): parameter
        for module in model.modules()
        if is_fully_sharded(module)
        for parameter in module.parameters()
        if is_traceable_wrapper_subclass(parameter)
    }


def freed_after_forward(model: nn.Module) -> set[int]:
    """Return the `id` of modules with parameters that FSDP2 frees after forward, to gather them again in backward.

    No public name tells what `fully_shard` and `set_reshard_after_forward` were told.
    """
    found: set[int] = set()
    is_first = True
    for module in model.modules():
        if not is_fully_sharded(module):
            continue
        state: Any = module._get_fsdp_state()  # type: ignore[operator]
        # Before the first forward the outermost one does not know yet that it will keep its parameters.
        will_keep = is_first and state._is_root is None and state._auto_reshard_after_forward
        is_first = False
        for group in state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]:
            if group is None or group.post_forward_mesh_info is None or will_keep:
                continue
            for parameter in group.fsdp_params:
                info = parameter._module_info
                found.update(id(holder) for holder in (info.module, *info.shared_modules))
    return found


@contextmanager
def filled_storages(note: Callable[[torch.UntypedStorage], object]) -> Iterator[None]:
    """Within the block, hear of each storage that its owner fills or empties by `resize_`, which no dispatch mode sees.

    So FSDP2 gathers parameters, and frees what it has gathered.
    """
    resize = torch.UntypedStorage.resize_
    had_own = "resize_" in vars(torch.UntypedStorage)

    def resized(storage: torch.UntypedStorage, size: int) -> object:
        result = resize(storage, size)
        note(storage)
        return result

    torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        if had_own:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        else:
            del torch.UntypedStorage.resize_
