"""Describe steps by the calls of the model and their shapes, and tell whether a plan for one step holds for a different one.

A plan holds for the recorded step and for smaller ones. A step is a sequence of calls, some with a backward between
them; once nothing waits for backward, a new group begins. A call is covered if a recorded group begins with the same
calls, in shapes at least as large, with equal arguments, from gradients that were alive then if they are now.

A change in how the model is built (layers, parameters, hooks) is noticed between steps. This check runs
in every step and takes microseconds: PyTorch reports what is registered in a module, and the rest shows in the lengths of
dictionaries and tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from operator import attrgetter, or_
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from recollect._torch_private import tree_leaves
from recollect.engine.together import is_partitioned
from recollect.tensors import has_strides, shape_of
from recollect.weak_hooks import register_weakly

CONTEXT: Final = ("data types", "training mode", "autocast", "how the model is built")
"""Names of the facts of a call's context."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the model with gradients on."""

    entry: str
    """Path of the module that was called; "" is the model itself."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of its tensor arguments, in order."""
    context: tuple[object, ...]
    """Facts that must be equal: data types, training mode, autocast, the model's structure."""
    arguments: tuple[object, ...] = ()
    """Arguments that are not tensors, in order; of numbers and objects, their class."""
    trained: int = -1
    """One byte for each parameter, 1 if it requires grad."""
    traced: int = 0
    """The same for its tensor arguments."""
    has_gradients: bool = False
    """Gradients were alive when it began."""
    is_open: bool = False
    """An earlier call still waited for its backward."""

    @property
    def numel(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    def __str__(self) -> str:
        """Describe the largest tensor: "4 x 2048"."""
        return shape_text(max(self.shapes, key=math.prod, default=()))

    def is_alike(self, other: Call) -> bool:
        """Whether the other differs only in its shapes, in which tensors require grad, and in memory held before."""
        return self.entry == other.entry and self.context == other.context and self.arguments == other.arguments

    def is_at_least(self, other: Call) -> bool:
        """Whether a call like the other one needs no more memory than this one, as far as its arguments tell."""
        return (
            self.is_alike(other)
            and len(self.shapes) == len(other.shapes)
            and all(map(_is_at_least, self.shapes, other.shapes))
            and not other.trained & ~self.trained
            and not other.traced & ~self.traced
            and (self.has_gradients or not other.has_gradients)
            and (self.is_open or not other.is_open)
        )


def other_arguments(
    calls: Sequence[Call], others: Sequence[Call]
) -> Iterator[tuple[tuple[str, int], tuple[object, object]]]:
    """Yield (module that is called, position) of each argument that differs between two steps, and its two values."""
    for one, other in zip(calls, others, strict=False):
        if one.entry == other.entry and len(one.arguments) == len(other.arguments):
            for position, values in enumerate(zip(one.arguments, other.arguments, strict=True)):
                if values[0] != values[1]:
                    yield (one.entry, position), values


def shape_text(shape: tuple[int, ...]) -> str:
    """Return a shape as printed: "4 x 2048"."""
    return " x ".join(map(str, shape)) or "a scalar"


def groups_of(calls: Sequence[Call]) -> list[list[Call]]:
    """Split the calls of a step where nothing waits for backward."""
    groups: list[list[Call]] = []
    for call in calls:
        if not call.is_open or not groups:
            groups.append([])
        groups[-1].append(call)
    return groups


def covering(recorded: Sequence[Call], calls: Sequence[Call]) -> list[int]:
    """Return the recorded calls that represent the last of these calls: the groups begin alike, and none is larger."""
    found = []
    begin, group = 0, groups_of(calls)[-1]
    # It adds to gradients; those alive when a step begins may be freed between its first forward and backward.
    adds = group[0].has_gradients and len(group) < len(calls)
    # If there were none before the step, they are of what its earlier calls trained.
    made, own_made = 0, _trained(calls[: -len(group)]) if adds else 0
    for known in groups_of(recorded):
        pairs = zip(known, group, strict=False)
        has_them = recorded[0].has_gradients or not own_made & ~made
        may_hold = (begin or not adds) and has_them and len(known) >= len(group)
        if may_hold and all(one.is_at_least(other) for one, other in pairs):
            found.append(begin + len(group) - 1)
        begin += len(known)
        made |= _trained(known)
    return found


def _trained(calls: Sequence[Call]) -> int:
    return reduce(or_, (call.trained for call in calls), 0)


def _is_at_least(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(shape) == len(other) and all(mine >= theirs for mine, theirs in zip(shape, other, strict=True))


# Numbers may count steps; the units and the allocator show their effects. The contents of objects are not inspected.
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
    """Return the shape of a call, which decides which plan covers it."""
    leaves = tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    return Call(
        entry=path,
        shapes=tuple(map(shape_of, tensors)),
        context=(tuple(tensor.dtype for tensor in tensors), module.training, autocast, structure.version),
        arguments=tuple(_seen(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor)),
        trained=_bits(map(_requires_grad, structure.parameters)),
        traced=_bits(map(_requires_grad, tensors)),
        has_gradients=structure.has_gradients(),
        is_open=is_open,
    )


def _seen(argument: Any) -> object:
    if type(argument) in _PLAIN or isinstance(argument, Enum):
        return argument
    return type(argument)


def _bits(flags: Iterable[bool]) -> int:
    # As bytes: shifting a number of hundreds of bits once for each takes several times as long.
    return int.from_bytes(bytes(flags), "little")


class Structure:
    """How a model is built.

    `parameters` are those of the model when `look` last found a change, `version` how often it did.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.version = 0
        self._is_stale = False
        self._handles = [
            register_weakly(register, self._note)
            for register in (register_module_module_registration_hook, register_module_parameter_registration_hook)
        ]
        self._read()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self.parameters)

    def with_gradients(self) -> frozenset[int]:
        return frozenset(at for at, parameter in enumerate(self.parameters) if parameter.grad is not None)

    def look(self) -> bool:
        """Return whether anything has changed since the last time."""
        shape, num_hooks = self._shape(), sum(map(len, self._hooks))
        if not self._is_stale and shape == self._seen_shape and num_hooks == self._num_hooks:
            return False
        before, hooks_before = self._built(), self._num_hooks
        self._read()
        has_changed = before != self._built() or hooks_before < self._num_hooks
        self.version += has_changed
        return has_changed

    def take_hooks(self) -> None:
        """Take hooks that a recorded call has put onto the model for no change: transformers does, to return router logits."""
        self._num_hooks = sum(map(len, self._hooks))

    def _note(self, module: nn.Module, name: str, registered: Any) -> None:
        if id(module) in self._ids and not any(
            vars(module)[kind].get(name) is registered for kind in ("_modules", "_parameters")
        ):
            self._is_stale = True

    def _built(self) -> tuple[list[int], list[int], int]:
        """Return a fingerprint of the modules, the parameters, and their sizes."""
        return [*map(id, self._modules)], [*map(id, self.parameters)], self._seen_shape[0]

    def _shape(self) -> tuple[int, int]:
        return sum(map(attrgetter("nbytes"), self._sized)), sum(map(len, self._children))

    def _read(self) -> None:
        self._modules = list(self._model.modules())
        self._ids = set(map(id, self._modules))
        self.parameters: Sequence[torch.Tensor] = list(self._model.parameters())
        # DeepSpeed's ZeRO-3 gathers parameters and frees them again.
        self._sized = [
            parameter for parameter in self.parameters if not is_partitioned(parameter) and has_strides(parameter)
        ]
        self._children: list[dict[str, Any]] = [m._modules for m in self._modules] + [
            m._parameters for m in self._modules
        ]
        self._hooks: list[dict[int, Any]] = [getattr(module, name) for module in self._modules for name in _HOOKS]
        self._seen_shape = self._shape()
        self._num_hooks = sum(map(len, self._hooks))
        self._is_stale = False
