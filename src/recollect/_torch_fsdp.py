"""Tells how FSDP2, and FSDP1 before it, handle the parameters of a model; the private names for that, with reasons."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from recollect._torch_dtensor import local_part, spec_of, spread
from recollect.errors import RecordError


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 puts a module's parameters in place while it runs; without importing it."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def is_flat_sharded(module: nn.Module) -> bool:
    """Whether a module is `FullyShardedDataParallel`, FSDP1's wrapper; without importing it."""
    return any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__)


def gathers_parameters(module: nn.Module) -> bool:
    return is_fully_sharded(module) or is_flat_sharded(module)


def gathers_inside(module: nn.Module) -> bool:
    """Whether FSDP gathers parameters within a module's forward: for modules in it, or FSDP1 for the one it wraps."""
    return is_flat_sharded(module) or any(gathers_parameters(part) for part in module.modules() if part is not module)


def fully_sharded_modules(model: nn.Module) -> list[Any]:
    """Return the modules of a model that FSDP2 shards, each with its state from `fully_shard`."""
    return [module for module in model.modules() if is_fully_sharded(module)]


def fully_sharded_parameters(model: nn.Module) -> dict[int, nn.Parameter]:
    """Return the parameters that FSDP2 shards, or holds whole, by `id`; ignored ones are not DTensors."""
    found: dict[int, nn.Parameter] = {}
    for module in fully_sharded_modules(model):
        whole = [
            p.unsharded_param for group in parameter_groups(module) if group.is_unsharded for p in group.fsdp_params
        ]
        sharded = [parameter for parameter in module.parameters() if is_traceable_wrapper_subclass(parameter)]
        found.update((id(parameter), parameter) for parameter in (*whole, *sharded))
    return found


def freed_after_forward(model: nn.Module) -> set[int]:
    """Return the `id` of modules with parameters that FSDP frees after forward, to gather them again in backward.

    No public name exposes the arguments of `fully_shard` and `set_reshard_after_forward`.
    """
    found = _freed_by_wrappers(model)
    is_first = True
    for module in fully_sharded_modules(model):
        state = module._get_fsdp_state()
        # Before the first forward the outermost one does not know yet that it will keep its parameters.
        will_keep = is_first and state._is_root is None and state._auto_reshard_after_forward
        is_first = False
        for group in parameter_groups(module):
            if group.post_forward_mesh_info is None or will_keep:
                continue
            for parameter in group.fsdp_params:
                info = parameter._module_info
                found.update(id(holder) for holder in (info.module, *info.shared_modules))
    return found


def _freed_by_wrappers(model: nn.Module) -> set[int]:
    """Return the same of FSDP1. No public name says which modules have their parameters in a wrapper's flat one."""
    wrappers: list[Any] = [module for module in model.modules() if is_flat_sharded(module)]
    inside = {id(part) for wrapper in wrappers for part in wrapper.modules() if part is not wrapper}
    found: set[int] = set()
    for wrapper in wrappers:
        # Before the first forward none knows yet whether it is the outermost, which keeps its parameters.
        is_outermost = id(wrapper) not in inside if wrapper._is_root is None else wrapper._is_root
        frees = wrapper.sharding_strategy.name in ("FULL_SHARD", "HYBRID_SHARD")
        if frees and not is_outermost and wrapper._flat_param is not None:
            flat = wrapper._flat_param
            found.update(id(info.module) for info in (*flat._param_infos, *flat._shared_param_infos))
    return found


def parameter_groups(module: nn.Module) -> list[Any]:
    """Return the parameters that FSDP2 gathers together, for a module that it shards."""
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


@contextmanager
def other_sharded_parameters(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Within the block, let FSDP2 work with other parameters; restore it afterwards.

    Yields a function to call when the others are in place. FSDP2 keeps its own references to the parameters it shards,
    and no public name replaces them.
    """
    modules = fully_sharded_modules(model)
    states = [module._get_fsdp_state() for module in modules]
    groups = [group for module in modules for group in parameter_groups(module)]
    sharded = [parameter for group in groups for parameter in group.fsdp_params]
    if any(parameter.sharded_param.device.type != "meta" or parameter.all_gather_outputs for parameter in sharded):
        raise RecordError(
            f"{type(model).__name__}: got real parameters that FSDP2 shards, expected them on the meta device to record on "
            "fake tensors. Build the model and call fully_shard under torch.device('meta'), or record with fake=False."
        )
    kept = [(thing, dict(vars(thing))) for thing in (*states, *groups, *sharded)]

    def use_others() -> None:
        for parameter in sharded:
            parameter.reset_sharded_param()

    try:
        yield use_others
    finally:
        for thing, attributes in kept:
            vars(thing).clear()
            vars(thing).update(attributes)


@contextmanager
def as_not_sharded(module: nn.Module, whole: Mapping[str, nn.Parameter]) -> Iterator[dict[int, Any]]:
    """Within the block, a module is what it was before FSDP2 sharded it or the model around it, with whole parameters.

    Nothing is gathered, since other processes may not do the same: stand-ins repeat this rank's part. FSDP2 replaces a module's
    class by one that cannot be copied, and no public name tells the first.

    No module inside it is sharded by itself. `whole`: the parameters as they were gathered, by name.

    Yields what a deep copy is to have in place of some objects, by `id`: the stand-ins themselves, and nothing of FSDP2.
    """
    own_class = type(module)
    sharded: list[tuple[nn.Module, str, Any]] = []
    stand_ins: dict[int, nn.Parameter] = {}
    modules: dict[str, nn.Module] = dict(module.named_modules(remove_duplicate=False))
    for name, parameter in whole.items():
        path, _, attribute = name.rpartition(".")
        holder = modules[path]
        part = getattr(holder, attribute)
        if part is not parameter and is_traceable_wrapper_subclass(part):
            sharded.append((holder, attribute, part))
            if id(parameter) not in stand_ins:
                stand_ins[id(parameter)] = _repeated(part, parameter)
            put_parameter(holder, attribute, stand_ins[id(parameter)])
    in_copies: dict[int, Any] = {id(stand_in): stand_in for stand_in in stand_ins.values()}
    if is_fully_sharded(module):
        in_copies[id(module._get_fsdp_state())] = None  # type: ignore[operator]
        module.__class__ = own_class.__bases__[1]
    try:
        yield in_copies
    finally:
        module.__class__ = own_class
        for holder, attribute, part in sharded:
            put_parameter(holder, attribute, part)


def put_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Replace a parameter of a module by one like it, unheard by hooks for new parameters."""
    # Recurrent modules keep a list of their parameters, which only their own `__setattr__` brings up to date.
    if isinstance(module, nn.RNNBase):
        setattr(module, name, parameter)
    else:
        module._parameters[name] = parameter


def _repeated(sharded: Any, whole: nn.Parameter) -> nn.Parameter:
    """Return a parameter like a whole one, with the numbers of this rank's part, over and over; ones where that is empty."""
    part, local = sharded.detach().to_local(), local_part(whole)
    found = torch.ones(local.numel(), dtype=whole.dtype, device=part.device if part.is_meta else whole.device)
    for piece in found.split(part.numel()) if part.numel() else ():
        piece.copy_(part.flatten()[: piece.numel()])
    made = nn.Parameter(spread(found.view(local.shape), spec_of(whole)), whole.requires_grad)
    if getattr(whole, "grad_dtype", whole.dtype) is not whole.dtype:
        made.grad_dtype = whole.grad_dtype
    return made


class GatheredParameters:
    """The parameters of a model that FSDP2 holds whole, and whose gradients it adds up whole, as in a pipeline's stage.

    No public name shows where these gradients are, or which of them it reduces together.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = fully_sharded_modules(model)
        # Modules that were sharded together have the same group.
        groups = list(dict.fromkeys(group for module in modules for group in parameter_groups(module)))
        if any(hasattr(module, "finalize_backward") for module in modules):
            groups.reverse()  # This method, of PyTorch 2.15, reduces the last one first; a schedule did the first one before.
        self._groups = [group for group in groups if group.is_unsharded and not group.reduce_grads]
        self._parameters = [parameter for group in self._groups for parameter in group.fsdp_params]
        # Until PyTorch 2.15, which sums in `.grad` of the whole parameters, in their `grad_dtype`.
        self._summed_apart = [one for one in self._parameters if "unsharded_accumulated_grad" in vars(one)]

    @property
    def own_parts(self) -> list[torch.Tensor]:
        """This rank's parts of them, besides the whole ones."""
        return [parameter.sharded_param for parameter in self._parameters]

    @property
    def gradients_apart(self) -> list[torch.Tensor]:
        """The sums of gradients in the reduced dtype, where it differs from that of the parameters."""
        sums = (parameter.unsharded_accumulated_grad for parameter in self._summed_apart)
        return [found for found in sums if found is not None]

    def begin_gradients_apart(self) -> None:
        """Have backward add to sums in the dtype that is reduced, if that is a different one."""
        for parameter in self._summed_apart:
            whole = parameter.unsharded_param
            if whole.requires_grad and parameter.reduce_dtype not in (None, whole.dtype):
                parameter.unsharded_accumulated_grad = torch.zeros_like(whole, dtype=parameter.reduce_dtype)
                whole.grad = None

    @contextmanager
    def gradients_apart_set_aside(self) -> Iterator[None]:
        """Set these sums aside; within the block, only sums made in it exist."""
        before = [parameter.unsharded_accumulated_grad for parameter in self._summed_apart]
        self._put_gradients_apart([None] * len(before))
        try:
            yield
        finally:
            self._put_gradients_apart(before)

    def _put_gradients_apart(self, gradients: list[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(self._summed_apart, gradients, strict=True):
            parameter.unsharded_accumulated_grad = gradient

    @property
    def reductions_bytes(self) -> list[int]:
        """The most bytes that a reduction at the end of a step needs besides the tensors that are whole before the first one.

        Parameters of a group are freed before its gradients are copied to send buffers, and the gradients after that.
        Then gloo copies the tensors that it sends, and received ones may get a different dtype.
        """
        found = []
        freed_bytes = 0
        for group in self._groups:
            num_sent = num_own = own_bytes = summed_bytes = 0
            dtypes = set()
            for parameter in group.fsdp_params:
                whole, own = parameter.unsharded_param, parameter.sharded_param
                size = parameter.padded_sharded_param_size.numel()
                whole_size = size * getattr(parameter.mesh_info, "shard_mesh_size", 1)
                freed_bytes += whole_size * whole.dtype.itemsize
                if own.requires_grad:
                    dtype = parameter.reduce_dtype or whole.grad_dtype or whole.dtype
                    dtypes.add(dtype)
                    num_sent += whole_size
                    num_own += size
                    summed_bytes += whole_size * dtype.itemsize
                    own_bytes += size * (own.grad_dtype or own.dtype).itemsize
            # All tensors that are sent together have one dtype.
            itemsize = reduce(torch.promote_types, dtypes).itemsize if dtypes else 0
            sent_bytes = num_sent * itemsize
            freed_bytes += summed_bytes
            found.append(max(0, sent_bytes + max(sent_bytes, own_bytes) + num_own * itemsize - freed_bytes))
            freed_bytes -= own_bytes
        return found
