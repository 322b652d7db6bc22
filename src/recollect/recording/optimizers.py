"""Find the optimizers in an argument: one, several, or inside a wrapper; and the state that they hold now."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from recollect._torch_fsdp import fully_sharded_modules
from recollect.errors import RecordError
from recollect.measuring.meter import storages_of
from recollect.profile.profile import block_bytes

Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def optimizers_in(optimizers: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers that step: members of collections one by one, and wrapped optimizers instead of wrappers.

    Args:
        optimizers: an optimizer, a wrapper that hands `step` and `state` on to one, a list, tuple or dict of these, an
            object whose `optimizers` or `chained_optimizers` are such a list, or None.
    """
    if optimizers is None:
        return []
    if isinstance(optimizers, Mapping):
        optimizers = list(optimizers.values())
    several = optimizers
    if not isinstance(several, (list, tuple)):
        several = getattr(optimizers, "optimizers", getattr(optimizers, "chained_optimizers", None))  # Megatron's.
    if isinstance(several, (list, tuple)):
        return list({id(found): found for item in several for found in optimizers_in(item)}.values())
    wrapped = _wrapped_by(optimizers)
    if wrapped is not None:
        return optimizers_in(wrapped)
    if isinstance(optimizers, type):
        raise RecordError(
            f"optimizer: got the class {optimizers.__name__}, expected an optimizer made from it. "
            f"Make one: {optimizers.__name__}(model.parameters())."
        )
    if isinstance(optimizers, (str, int)):
        raise RecordError(
            f"optimizer: got {optimizers!r}, expected an optimizer. A budget comes after it: "
            f"recollect.attach(model, optimizer, {optimizers!r})."
        )
    if not all(hasattr(optimizers, name) for name in ("param_groups", "state", "step")):
        raise RecordError(
            f"optimizer: got a {type(optimizers).__name__}, expected an optimizer of torch.optim or one made like them, with "
            "`param_groups`, `state` and `step`; several as a list."
        )
    return [optimizers]


def _wrapped_by(optimizer: Any) -> Any:
    """Return the optimizer that this one only wraps; None if it has its own state, as Lookahead does."""
    # Its inner optimizer has this rank's share of the parameters.
    if any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__):
        return optimizer.optim
    names = ("optimizer", "optim", "original_optimizer")  # The last one is Opacus's.
    inner = next((getattr(optimizer, name) for name in names if hasattr(optimizer, name)), None)
    if inner is None or not hasattr(inner, "param_groups") or not hasattr(inner, "state"):
        return None
    return inner if getattr(optimizer, "state", inner.state) is inner.state else None


def check_optimizers(model: nn.Module, optimizers: Any) -> None:
    """Raise if the optimizers belong to a different model.

    Full-precision copies of the parameters, views of them, and the flat parts of them that ZeRO steps over, are not a mistake:
    an optimizer over parameters of other dtypes, or in a wrapper, is not checked, nor is any of a model that FSDP2 shards,
    which has whole parameters in place of the optimizer's while gathered. What steps over no parameter of a frozen model
    trains its inputs.
    """
    found = optimizers_in(optimizers)
    steps_over = [p for optimizer in found for group in optimizer.param_groups for p in group["params"]]
    own = {id(parameter) for parameter in model.parameters()}
    if not own or not steps_over or any(id(parameter) in own for parameter in steps_over):
        return
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return
    if fully_sharded_modules(model) or not set(storages_of(steps_over)).isdisjoint(storages_of(model.parameters())):
        return
    given = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    if len(given) != len(found) or any(one is not other for one, other in zip(given, found, strict=True)):
        return
    copies = storages_of(beside_parameters(model.parameters(), "main_param"))
    if copies and not set(storages_of(steps_over)).isdisjoint(copies):
        return
    if not copies and {p.dtype for p in steps_over} - {p.dtype for p in model.parameters()}:
        return
    names = " and ".join(type(optimizer).__name__ for optimizer in found)
    raise RecordError(
        f"optimizer: none of the {len(steps_over)} parameters of {names} is a parameter of this {type(model).__name__}, so it "
        "trains a different model, or this one's parameters were replaced after it was made. Make it from this model's "
        "parameters()."
    )


def state_tensors(optimizers: Any) -> list[torch.Tensor]:
    found = optimizers_in(optimizers)
    found += [inner for outer in found for inner in vars(outer).values() if isinstance(inner, torch.optim.Optimizer)]
    return tensors_in_state([list(optimizer.state.values()) for optimizer in found])


def copied_weights(parameters: Iterable[torch.Tensor], optimizers: Any) -> list[torch.Tensor]:
    """Return the tensors the optimizers step over in place of a model's parameters, such as full-precision copies."""
    steps_over = [p for found in optimizers_in(optimizers) for group in found.param_groups for p in group["params"]]
    storages = storages_of(parameters)
    own = {id(storage) for storage in storages}
    return [p for p in steps_over if not any(id(storage) in own for storage in storages_of([p]))]


def beside_parameters(parameters: Iterable[torch.Tensor], name: str) -> list[torch.Tensor]:
    """Return what Megatron has put beside parameters: parts of its gradient buffers as `main_grad`, copies as `main_param`."""
    return [found for p in parameters if isinstance(found := getattr(p, name, None), torch.Tensor)]


def tensors_in_state(state: Any) -> list[torch.Tensor]:
    """Return the distinct tensors in some optimizer state, which may be dictionaries of a special class."""
    if isinstance(state, torch.Tensor):
        return [state]
    items = state.values() if isinstance(state, Mapping) else state if isinstance(state, (list, tuple, set)) else ()
    return list({id(found): found for item in items for found in tensors_in_state(item)}.values())


def present_state_bytes(optimizers: Any, device: torch.device) -> int:
    """Return the bytes of the state that the optimizers have now on a device, in blocks of its allocator.

    Step counts and state that was moved to the CPU do not count on a GPU.
    """
    storages = storages_of(on_device(state_tensors(optimizers), device))
    return sum(block_bytes(storage.nbytes(), device.type) for storage in storages)


def on_device(tensors: Iterable[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return the tensors on devices of this type; some optimizers keep step counts in tensors on the CPU."""
    return [tensor for tensor in tensors if tensor.device.type == device.type]
