"""Tells how PyTorch's composable `replicate` averages gradients, as `DistributedDataParallel` does without being a wrapper."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch.distributed as dist
from torch import nn

_MODULE: Final = "torch.distributed._composable.replicate"


def _replicated(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """Yield the modules that `replicate` was applied to, with their state, which no public name shows; without importing it.

    The state has a `DistributedDataParallel`, which is not among the modules of the model, and runs it in hooks.
    """
    for module in model.modules():
        if own_class(module) is not type(module):
            yield module, sys.modules[_MODULE].replicate.state(module)


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return a module's class without `replicate`, which gives each module a new class of its own."""
    classes = type(module).__mro__
    is_marked = (classes[1].__module__, classes[1].__name__) == (_MODULE, "DDP")
    return classes[2] if is_marked else type(module)


def replica_states(model: nn.Module) -> list[Any]:
    """Return the states of what `replicate` was applied to; see `begin_replicas`."""
    return [state for _, state in _replicated(model)]


def begin_replicas(model: nn.Module) -> None:
    """Have `replicate` make its `DistributedDataParallel` now, of the parameters in place, and not in the first forward.

    All processes have to call this together.
    """
    for state in replica_states(model):
        if not state.has_initialized:
            arguments = state._init_args, state._init_kwargs
            state.lazy_init()
            # With them the first forward comes here again, and has the hooks that are registered until then.
            state._init_args, state._init_kwargs = arguments


@contextmanager
def without_replicas(model: nn.Module) -> Iterator[None]:
    """Within the block, no `replicate` awaits gradients, or begins with other parameters than the model's own."""
    kept = []
    for module, state in _replicated(model):
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            kept.append((hooks, dict(hooks)))
            for number in [number for number, hook in hooks.items() if getattr(hook, "__self__", None) is state]:
                del hooks[number]
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.clear()
            hooks.update(before)


def awaited_bucket_bytes(state: Any) -> int:
    """Return the size of all buckets that a state will have from the first forward on; 0 if it has them."""
    if state.has_initialized:
        return 0
    module, ignored = state._init_args
    left_out = {id(parameter) for other in ignored for parameter in other.parameters()}
    return sum(p.nbytes for p in module.parameters() if p.requires_grad and id(p) not in left_out)


def processes_of_replica(state: Any) -> Sequence[int]:
    """Return the processes of a state, whose arguments wait for the first forward."""
    if state.has_initialized:
        return dist.get_process_group_ranks(state._ddp.process_group)
    mesh = state._init_kwargs.get("device_mesh")
    return dist.get_process_group_ranks(state._init_kwargs.get("process_group") if mesh is None else mesh.get_group())
