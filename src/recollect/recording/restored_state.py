"""Restore the state that a step changes: gradients, buffers, attributes of modules, random generators; keep hooks from firing.

While a step runs that must leave no traces, the model's trained parameters are replaced by stand-ins on the same memory.
Users of the real ones (optimizers that step in backward, gradient buckets, hooks) do not run and see no gradient.

Also keep FSDP2 parameters of a pipeline's stage gathered, as they are from the stage's first forward to its last backward.
"""

import copy
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final, cast

import numpy as np
import torch
from torch import nn

from recollect._torch_fsdp import (
    GatheredParameters,
    fully_sharded_modules,
    fully_sharded_parameters,
    is_fully_sharded,
    put_parameter,
)
from recollect._torch_parallel import is_data_parallel
from recollect._torch_replicate import begin_replicas, without_replicas
from recollect.arguments import check_kind
from recollect.engine.content import has_same_bits
from recollect.errors import RecordError
from recollect.recording.optimizers import tensors_in_state

HOOKS: Final = tuple(name for name in vars(nn.Module()) if "_hooks" in name)
"""Names of a module's tables of hooks, which stay the same objects."""
HOOKS_OF_RUNS: Final = tuple(name for name in HOOKS if "state_dict" not in name)
"""Those that a step runs. FSDP2 adds others in its first forward, once and for good."""
_CONTAINERS: Final = (list, dict, set, deque, OrderedDict, defaultdict)
_NOT_ATTRIBUTES: Final = frozenset(vars(nn.Module())) - {"training"}


@contextmanager
def undisturbed(model: nn.Module, *, keeps_attributes: bool = False) -> Iterator[None]:
    """Restore the model and the random generators after the block; steps may run in it.

    Gradients are set aside; hooks of parameters do not run, and hooks that the step adds to modules are removed. Attributes of
    modules are restored: those that the step rebinds (counters, lazily made tables), and the content of tensors, generators,
    lists, dicts and sets; what is inside other objects stays changed.

    `keeps_attributes`: only the content of tensors and generators is restored, and tables that the step makes stay.
    """
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        with ExitStack() as stack:
            free_gradients(model.parameters())
            stack.enter_context(GatheredParameters(model).gradients_apart_set_aside())
            # The first to enter: modules' references to parameters are then restored before the parameters.
            stack.enter_context(_without_parameter_hooks(model))
            stack.enter_context(restored_generators(model))
            stack.enter_context((_restored_content if keeps_attributes else restored_attributes)(model))
            stack.enter_context(restored_buffers(model))
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def free_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Free the gradients of parameters, whatever the model's own `zero_grad` does."""
    for parameter in parameters:
        parameter.grad = None


def leaves_of(loss: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors to which a backward adds gradients."""
    pending: list[Any] = [loss.grad_fn]
    nodes: dict[Any, None] = {}
    while pending:
        node = pending.pop()
        if node is not None and node not in nodes:
            nodes[node] = None
            pending += [following for following, _ in node.next_functions]
    return [node.variable for node in nodes if node.name() == "torch::autograd::AccumulateGrad"]


@contextmanager
def restored_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers (batch norm statistics) after the block, also those that forward replaces by new tensors."""
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        for module, name, buffer, before in buffers:
            module._buffers[name] = buffer
            _write_back(buffer, before)


@contextmanager
def restored_attributes(model: nn.Module) -> Iterator[None]:
    """Restore the plain attributes of all modules, and their hooks, to their state before the block.

    Both together, since a model that installs hooks in its first forward remembers that in an attribute.
    """
    before = [_Parts(module) for module in model.modules()]
    try:
        yield
    finally:
        for parts in before:
            parts.put()


@contextmanager
def _restored_content(model: nn.Module) -> Iterator[None]:
    attributes = [value for module in model.modules() for value in attributes_of(module).values()]
    kept = [value for value in attributes if isinstance(value, (torch.Tensor, torch.Generator))]
    before = [restore for value in kept if (restore := _restoring(value)) is not None]
    try:
        yield
    finally:
        for restore in before:
            restore()


class _Parts:
    """A module's attributes and hooks at some moment."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes = attributes_of(module)
        self._content = [restore for value in self._attributes.values() if (restore := _restoring(value)) is not None]
        # Few are not empty, and there are many.
        self._hooks = {name: dict(hooks) for name in HOOKS_OF_RUNS if (hooks := vars(module).get(name))}

    def put(self) -> None:
        for name in attributes_of(self._module).keys() - self._attributes.keys():
            del vars(self._module)[name]
        vars(self._module).update(self._attributes)
        for restore in self._content:
            restore()
        for name in HOOKS_OF_RUNS:
            hooks, before = vars(self._module).get(name, {}), self._hooks.get(name, {})
            if hooks or before:
                hooks.clear()
                hooks.update(before)


def _restoring(value: Any) -> Callable[[], object] | None:
    """Return what puts the present content of an attribute back; None if it has none, or one that is not known."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if type(value) is torch.Tensor:
        return partial(_write_back, value, value.detach().clone())
    if type(value) in _CONTAINERS:
        return partial(_fill_again, value, copy.copy(value))
    return None


def _fill_again(container: Any, before: Any) -> None:
    container.clear()
    (container.extend if hasattr(container, "extend") else container.update)(before)


def _write_back(tensor: torch.Tensor, before: torch.Tensor) -> None:
    if not has_same_bits(tensor, before):
        with torch.no_grad():
            tensor.copy_(before)


def attributes_of(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _NOT_ATTRIBUTES}


def present_generators(cuda_devices: Iterable[int] = ()) -> Callable[[], object]:
    """Return what puts the generators of PyTorch, Python and NumPy back, and of these devices: models draw from them all."""
    of_pytorch, of_python, of_numpy = torch.random.get_rng_state(), random.getstate(), np.random.get_state()
    of_devices = [(device, torch.cuda.get_rng_state(device)) for device in cuda_devices]

    def put_back() -> None:
        torch.random.set_rng_state(of_pytorch)
        for device, state in of_devices:
            torch.cuda.set_rng_state(state, device)
        random.setstate(of_python)
        np.random.set_state(of_numpy)

    return put_back


def present_state(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """Return what puts an optimizer's groups and state back: the same tensors, with their present content.

    `load_state_dict` would put others in their place, and cast them to the type of their parameter.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = tensors_in_state(
        [list(optimizer.state.values()), [{**group, "params": []} for group in optimizer.param_groups]]
    )
    content = [partial(_write_back, tensor, tensor.detach().clone()) for tensor in own]
    present: Any = dict(optimizer.state), list(optimizer.param_groups)

    def copied(parts: Any) -> Any:
        return copy.deepcopy(parts, {id(tensor): tensor for tensor in (*parameters, *own)})

    before = copied(present)

    def put_back() -> None:
        state, groups = copied(before)
        _fill_again(optimizer.state, state)
        for group, values in zip(optimizer.param_groups, groups, strict=False):
            _fill_again(group, values)
        for restore in content:
            restore()

    return put_back


@contextmanager
def restored_generators(model: nn.Module) -> Iterator[None]:
    put_back = present_generators({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    try:
        yield
    finally:
        put_back()


@contextmanager
def _without_parameter_hooks(model: nn.Module) -> Iterator[None]:
    """Replace the trained parameters by stand-ins on the same memory, which no hook knows."""
    if any(kind.__module__ == "deepspeed.runtime.engine" for kind in type(model).__mro__):
        raise RecordError(
            f"cannot record {type(model).__name__} on a batch: only the engine itself runs a step of it, with its reduction of "
            "gradients. Make it with recollect.integrations.deepspeed.initialize(..., memory_budget=...), which keeps its "
            "steps within a budget, or pass step=, which runs the engine's own step."
        )
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):
            raise RecordError(
                f"cannot record {type(model).__name__}: DeepSpeed ZeRO-3 has partitioned its parameter {name!r}, and a step "
                "beside the engine's own would change the partitions. Record before deepspeed.initialize, or pass step=, "
                "which runs the engine's own step."
            )
    # Else they would be made of the stand-ins.
    begin_replicas(model)
    sharded = fully_sharded_parameters(model)
    stand_ins: dict[int, nn.Parameter] = {}
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    with ExitStack() as stack:
        stack.enter_context(without_replicas(model))
        for module in model.modules():
            if is_data_parallel(module):
                stack.enter_context(_without_reducer(cast(Any, module)))
            for name, own in module._parameters.items():
                if id(own) in sharded:
                    stack.enter_context(_without_hooks(sharded[id(own)]))
                elif own is not None and own.requires_grad:
                    stand_ins.setdefault(id(own), nn.Parameter(own.detach()))
                    replaced.append((module, name, own))
        try:
            for module, name, replaced_one in replaced:
                put_parameter(module, name, stand_ins[id(replaced_one)])
            yield
        finally:
            for module, name, replaced_one in replaced:
                put_parameter(module, name, replaced_one)


@contextmanager
def _without_reducer(module: Any) -> Iterator[None]:
    """Keep `DistributedDataParallel` from awaiting gradients.

    With a static graph it also awaits them without synchronisation, unless only the wrapped module runs.
    """
    attributes = vars(module)
    before = attributes.get("forward")
    if module.static_graph:
        attributes["forward"] = module.module
    try:
        with module.no_sync():
            yield
    finally:
        attributes.pop("forward", None)
        if before is not None:
            attributes["forward"] = before


@contextmanager
def _without_hooks(parameter: nn.Parameter) -> Iterator[None]:
    """Set aside the hooks that run once a parameter has its gradient.

    For parameters of FSDP2, which replaces stand-ins by its own parameters and runs these hooks itself.
    """
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    before = dict(hooks)
    hooks.clear()
    try:
        yield
    finally:
        hooks.update(before)


@contextmanager
def gathered_stage(stage: nn.Module) -> Iterator[None]:
    """Within the block, hold whole parameters of a stage that FSDP2 shards, and let backward reduce no gradients.

    A stage is in this state from its first forward to its last backward: `torch.distributed.pipelining` adds up whole
    gradients, and has FSDP2 reduce them at the end of the step. Record the stage in this block; else each of its
    micro-batches in flight counts with its own whole parameters.

    Args:
        stage: all or none of it is gathered. All ranks that share it have to call this together. A module to
            which `fully_shard` was not applied itself is left alone, as torch's schedules leave it.

    Returns:
        A context manager.

    Raises:
        ArgumentError: it is not a module.

    Example:
        >>> import torch, recollect
        >>> from torch import nn
        >>> stage = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)))
        >>> with recollect.gathered_stage(stage):  # after fully_shard(stage)
        ...     profile = recollect.record(
        ...         stage, torch.randn(16, 32), loss_fn=torch.sum, gradients="accumulated", holds_output=False
        ...     )
    """
    check_kind("gathered_stage(stage)", "stage", stage, nn.Module, "torch.nn.Module")
    if not is_fully_sharded(stage):
        yield
        return
    for module in fully_sharded_modules(stage):
        module.unshard()
    _reduce_in_backward(stage, False)
    try:
        yield
    finally:
        _reduce_in_backward(stage, True)
        free_gathered(stage)


def free_gathered(model: nn.Module) -> None:
    """Free a model's parameters gathered by FSDP2, as a backward would; they are this rank's parts again."""
    for module in fully_sharded_modules(model):
        module.reshard()


def _reduce_in_backward(stage: nn.Module, reduces: bool) -> None:
    """Have backward reduce gradients and free parameters, or neither.

    Each backward may count as the last one, as by default: otherwise FSDP2 awaits the last, and PyTorch 2.15 refuses to
    let a schedule finalize by hand until then.
    """
    sharded = cast(Any, stage)
    sharded.set_reshard_after_backward(reduces)
    sharded.set_requires_gradient_sync(reduces)
