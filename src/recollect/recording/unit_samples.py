"""Copy units and their inputs while a step is recorded, to rerun them on their own.

A copy runs again: neither the model's parameters nor its hooks, counters or caches are touched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from types import CellType, FunctionType, MethodType
from typing import Any, Final

import torch
from torch import nn

from recollect._torch_dtensor import spec_of
from recollect._torch_fsdp import as_not_sharded, gathers_inside
from recollect._torch_private import (
    has_compiled_forward,
    is_compiled_module,
    is_traceable_wrapper_subclass,
    tree_leaves,
    tree_map,
    without_compiler,
)
from recollect.profile.profile import Profile
from recollect.recording.restored_state import HOOKS, HOOKS_OF_RUNS
from recollect.tensors import has_strides, shape_of, tensors_held, tensors_in

# From this many bytes on, an excerpt of a tensor has one element in this many along its longest dimension.
_LARGE_BYTES: Final = 1 << 13
_EXCERPT: Final = 16
_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class Excerpt:
    """A part of a float tensor that represents all of it: the start of its longest dimension, repeated.

    The time of ops hardly depends on the numbers; where it does (in routing tokens to experts), ops see real ones.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._shape = tensor.shape
        self._stride = torch.empty_like(tensor, device="meta").stride()
        self._dim = max(range(tensor.dim()), key=tensor.size)
        self.part = tensor.narrow(self._dim, 0, -(-tensor.size(self._dim) // _EXCERPT)).clone()

    @staticmethod
    def stands_for(leaf: Any) -> bool:
        """Whether an excerpt would suffice, and would be enough smaller to matter."""
        return (
            type(leaf) is torch.Tensor
            and has_strides(leaf)
            and leaf.is_floating_point()
            and leaf.nbytes >= _LARGE_BYTES
        )

    def repeated(self) -> torch.Tensor:
        whole = torch.empty_strided(self._shape, self._stride, dtype=self.part.dtype, device=self.part.device)
        for piece in whole.split(self.part.size(self._dim), self._dim):
            piece.copy_(self.part.narrow(self._dim, 0, piece.size(self._dim)))
        return whole


@dataclass(frozen=True)
class UnitSample:
    """One call of a unit: the module, not yet copied, and copies of its arguments; of large tensors perhaps a part (`Excerpt`).

    `requires_grad`: for each leaf of the arguments, if it did. `autocast`: the type to which it was cast; None if off.
    `input_values`, `output_values`: for each leaf of the arguments, and each tensor returned, the index of the value that it is
    in the unit's graph; -1 if it is none. `num_hooks`: of modules inside the unit; some models put hooks on while they run.
    `parameters`: as the call found them, by name; FSDP2 has this process's parts in their place before and after it.
    `first_alike`: the first call of its kind, whose tensors these are; numbers are the call's own.
    """

    call: int
    module: nn.Module
    args: Any
    kwargs: Any
    requires_grad: tuple[bool, ...]
    autocast: torch.dtype | None
    input_values: tuple[int, ...] = ()
    output_values: tuple[int, ...] = ()
    num_hooks: int = 0
    parameters: Mapping[str, nn.Parameter] = field(default_factory=dict)
    first_alike: int = 0

    def whole(self) -> UnitSample:
        args, kwargs = tree_map(
            lambda leaf: leaf.repeated() if isinstance(leaf, Excerpt) else leaf, (self.args, self.kwargs)
        )
        return replace(self, args=args, kwargs=kwargs)

    def copied_module(self, *, shares_parameters: bool = False) -> nn.Module:
        """Return a copy of the module, without hooks; functions in place of a `forward` call the copy, too.

        The module's attributes may raise anything when they are copied.
        """
        copies: dict[int, Any] = {}
        for module in self.module.modules():
            for name in HOOKS:
                hooks = vars(module).get(name)
                if hooks is not None:
                    copies[id(hooks)] = type(hooks)()
        if shares_parameters:
            own = (*self.module.parameters(), *self.module.buffers())
            copies |= {id(tensor): tensor for tensor in own}
        with as_not_sharded(self.module, self.parameters) as in_copies:
            copies |= in_copies
            copied = copy.deepcopy(self.module, copies)
        for module in copied.modules():
            if isinstance(own_forward := vars(module).get("forward"), FunctionType):
                vars(module)["forward"] = _of_copies(own_forward, copies)
        return copied

    def inputs(self, leaves: list[torch.Tensor]) -> tuple[Any, Any]:
        """Return the arguments again, on new leaves; add the leaves that require grad to a list."""
        requires_grad = iter(self.requires_grad)

        def private(item: Any) -> Any:
            needs_gradient = next(requires_grad)
            if not isinstance(item, torch.Tensor):
                return copy.deepcopy(item)
            if not needs_gradient:
                return item
            leaves.append(item.detach().requires_grad_())
            return leaves[-1].clone()  # No leaf: the unit may write to it.

        args, kwargs = tree_map(private, (self.args, self.kwargs))
        return args, kwargs


class FailedKinds:
    """Why units of a kind cannot be traced, or compiled: after two of a kind others would fail as well, and take as long."""

    def __init__(self) -> None:
        self._reasons: dict[int, list[str]] = {}

    def note(self, sample: UnitSample, reason: str) -> str:
        self._reasons.setdefault(sample.first_alike, []).append(reason)
        return reason

    def reason(self, sample: UnitSample) -> str:
        reasons = self._reasons.get(sample.first_alike, ())
        return reasons[0] if len(reasons) > 1 else ""


class UnitSamples:
    """Copies the inputs of one call of each kind of unit: the same class, parameters and arguments, by shapes and strides.

    Calls of a kind may have different graphs: nothing reads the output of the last of several layers, or every second layer
    shifts its windows. They share the inputs, and run on modules of their own.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        in_excerpts: bool = False,
        takes_any: bool = True,
        takes_parts: bool = False,
    ) -> None:
        self._in_excerpts, self._takes_any, self._takes_parts = in_excerpts, takes_any, takes_parts
        self._modules = dict(model.named_modules(remove_duplicate=False))
        # Looked up now: while the step is recorded, a unit has a placed forward.
        self._compiled = {path for path, module in self._modules.items() if has_compiled_forward(module)}
        self._device = device
        self._kinds: dict[Any, int] = {}
        self._of_calls: dict[int, UnitSample] = {}

    @property
    def held_bytes(self) -> int:
        firsts = (sample for call, sample in self._of_calls.items() if call == sample.first_alike)
        return sum(tensor.nbytes for one in firsts for tensor in tensors_held((one.args, one.kwargs)))

    def of_graphs(self, profile: Profile, left_out: Container[int] = ()) -> dict[int, UnitSample]:
        """Return, for each graph of a profile, a sample of one that has it, or has the same ops on as many bytes."""
        found: dict[int, UnitSample] = {}
        by_ops: dict[Any, UnitSample] = {}
        for call, sample in self._of_calls.items():
            if call not in left_out:
                graph = profile.graph_of(profile.calls[call])
                values = tuple((value.name, value.nbytes, value.producer) for value in graph.values)
                ops = sample.first_alike, tuple(op.name for op in graph.ops), values
                found.setdefault(profile.calls[call].graph, by_ops.setdefault(ops, sample))
        return found

    def take(self, path: str, call: int, args: Any, kwargs: Any) -> None:
        """Note a call, with copies of its inputs if it is the first of its kind, unless it cannot run by itself."""
        if not self._takes_any:
            return
        module = without_compiler(self._modules[path])  # A unit runs eagerly, and so does a copy of it.
        if path in self._compiled or not self._runs_alone(module):
            return
        kind_of_device = self._device.type
        autocast = torch.get_autocast_dtype(kind_of_device) if torch.is_autocast_enabled(kind_of_device) else None
        of_arguments = _shapes(tree_leaves((args, kwargs)))
        kind = type(module), module.training, autocast, _shapes(module.parameters()), of_arguments
        first = self._kinds.setdefault(kind, call)
        parameters = dict(nn.Module.named_parameters(module, remove_duplicate=False))
        if first != call:
            if alike := self._of_calls.get(first):
                args, kwargs = _with_own_numbers(alike, tree_leaves((args, kwargs)))
                own = replace(alike, call=call, module=module, args=args, kwargs=kwargs, parameters=parameters)
                self._of_calls[call] = replace(own, num_hooks=num_hooks(module))
            return
        try:
            leaves = [
                Excerpt(leaf.detach()) if self._in_excerpts and Excerpt.stands_for(leaf) else _copied(leaf)
                for leaf in tree_leaves((args, kwargs))
            ]
        except (TypeError, RuntimeError, NotImplementedError, AttributeError):
            return  # An argument that cannot be copied, such as a lock: this unit is timed op by op.
        requires_grad = tuple(isinstance(t, torch.Tensor) and t.requires_grad for t in tree_leaves((args, kwargs)))
        remaining = iter(leaves)
        args, kwargs = tree_map(lambda _: next(remaining), (args, kwargs))
        self._of_calls[call] = UnitSample(
            call,
            module,
            args,
            kwargs,
            requires_grad,
            autocast,
            first_alike=call,
            num_hooks=num_hooks(module),
            parameters=parameters,
        )

    def _runs_alone(self, module: nn.Module) -> bool:
        """Whether a sample does what the module does: not if modules inside gather or compile again, or it lacks parameters.

        With parts of them a module can be traced; only their processes together can run it.
        """
        inside = (part for part in module.modules() if part is not module)
        if gathers_inside(module) or any(map(is_compiled_module, inside)):
            return False
        return not any(
            hasattr(one, "ds_id") or (is_traceable_wrapper_subclass(one) and not (self._takes_parts and spec_of(one)))
            for one in module.parameters()
        )

    def note_values(self, call: int, value_of: Callable[[Any], int], leaves: list[Any], output: Any) -> None:
        """Note which values a call read and returned, if there is a sample of it; `value_of` returns -1 for anything else.

        `leaves`: of its arguments, as it got them.
        """
        if sample := self._of_calls.get(call):
            inputs = tuple(map(value_of, leaves))
            outputs = tuple(map(value_of, tensors_in(output)))
            self._of_calls[call] = replace(sample, input_values=inputs, output_values=outputs)


def _of_copies(item: Any, copies: dict[int, Any]) -> Any:
    """Return a function with the copies of modules in place of those in its closure; anything else as it is, or as copied."""
    if isinstance(item, nn.Module) or id(item) in copies:
        return copies.get(id(item), item)
    if isinstance(item, MethodType):
        return MethodType(item.__func__, _of_copies(item.__self__, copies))
    if not isinstance(item, FunctionType) or not item.__closure__:
        return item
    cells = tuple(CellType() for _ in item.__closure__)
    copies[id(item)] = function = FunctionType(item.__code__, item.__globals__, item.__name__, item.__defaults__, cells)
    function.__kwdefaults__ = item.__kwdefaults__
    for cell, own in zip(cells, item.__closure__, strict=True):
        cell.cell_contents = _of_copies(own.cell_contents, copies)
    return function


def _with_own_numbers(alike: UnitSample, leaves: list[Any]) -> tuple[Any, Any]:
    """Layers may loop as often as a number says."""
    own = iter(leaves)
    args, kwargs = tree_map(
        lambda leaf: number if isinstance(number := next(own), (int, float)) else leaf, (alike.args, alike.kwargs)
    )
    return args, kwargs


def num_hooks(module: nn.Module) -> int:
    inside = [vars(part) for part in module.modules() if part is not module]
    return sum(len(part.get(name) or ()) for part in inside for name in HOOKS_OF_RUNS)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone()
    if isinstance(leaf, nn.Module):
        raise TypeError("a module as an argument: a copy of it would not be the model's")
    if isinstance(leaf, _PLAIN):
        return leaf
    # `deepcopy` refuses results of ops, such as the keys and values that layers before this one left in a cache.
    made = {id(t): t.detach().clone().requires_grad_(t.requires_grad) for t in tensors_held(leaf) if not t.is_leaf}
    return copy.deepcopy(leaf, made)


def _shapes(items: Any) -> tuple[Any, ...]:
    """Return what tells calls apart: layers may branch on flags and words, and count with other numbers.

    Ops go by strides: a linear layer adds its bias apart if its input is not contiguous.
    """
    return tuple(
        (shape_of(item), item.stride() if has_strides(item) else None, item.dtype, item.requires_grad)
        if isinstance(item, torch.Tensor)
        else item
        if isinstance(item, (bool, str))
        else type(item)
        for item in items
    )
