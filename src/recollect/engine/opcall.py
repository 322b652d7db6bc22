"""Runs one recorded op again, with its arguments, its generator state and, if it writes in place, its target."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from recollect.engine.facts import OpFacts
from recollect.engine.values import Layout, TapeValue

GeneratorState = tuple[torch.Generator, torch.Tensor]


class _Slot:
    """Stands for the call's tensor argument number `index`."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


# Most ops have at most three tensors; these slots are made once and shared.
_FIRST_SLOTS = tuple(_Slot(index) for index in range(8))

# Checked before `isinstance(argument, torch.Tensor)`, which is slow for anything that is not a tensor.
_CONSTANTS = frozenset(
    {int, float, bool, type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format}
)


def _slot(index: int) -> _Slot:
    return _FIRST_SLOTS[index] if index < len(_FIRST_SLOTS) else _Slot(index)


class _Slots(list[Any]):
    """A list argument (`cat`, `index`) that contains tensors."""


class Arguments:
    """The arguments of a recorded op: tensors as values (`values`, in slot order), everything else unchanged."""

    __slots__ = ("args", "kwargs", "values")

    def __init__(
        self, value_of: Callable[[torch.Tensor], TapeValue], facts: OpFacts, args: Any, kwargs: dict[str, Any]
    ) -> None:
        self.values: list[TapeValue] = []
        if facts.running_stats is not None and args[facts.running_stats[1]]:
            hidden = facts.running_stats[0]
            args = [None if position in hidden else a for position, a in enumerate(args)]
        self.args = self._bind(args, value_of)
        self.kwargs = dict(zip(kwargs, self._bind(kwargs.values(), value_of), strict=True)) if kwargs else kwargs

    def _bind(self, arguments: Iterable[Any], value_of: Callable[[torch.Tensor], TapeValue]) -> list[Any]:
        bound: list[Any] = []
        values = self.values
        for argument in arguments:
            kind = type(argument)
            if kind in _CONSTANTS:
                bound.append(argument)
            elif kind is torch.Tensor or isinstance(argument, torch.Tensor):
                bound.append(_slot(len(values)))
                values.append(value_of(argument))
            elif isinstance(argument, (list, tuple)) and any(isinstance(a, torch.Tensor) for a in argument):
                bound.append(_Slots(self._bind(argument, value_of)))
            else:
                bound.append(argument)
        return bound


def _fill(arguments: list[Any], tensors: list[Any]) -> list[Any]:
    """Return the arguments with their slots replaced by tensors."""
    return [tensors[a.index] if type(a) is _Slot else _fill(a, tensors) if type(a) is _Slots else a for a in arguments]


def _fill_keywords(kwargs: dict[str, Any], tensors: list[Any]) -> dict[str, Any]:
    return dict(zip(kwargs, _fill(list(kwargs.values()), tensors), strict=True)) if kwargs else kwargs


class _Call:
    __slots__ = ("args", "func", "kwargs", "state")

    def __init__(self, func: Any, arguments: Arguments, state: GeneratorState | None) -> None:
        self.func = func
        self.args, self.kwargs = arguments.args, arguments.kwargs
        self.state = state

    @property
    def state_bytes(self) -> int:
        """Size of the generator state held to run a random op again."""
        return 0 if self.state is None else self.state[1].nbytes


class OpCall(_Call):
    """Runs an op that makes new tensors."""

    __slots__ = ()

    def __call__(self, tensors: list[Any], may_overwrite_first: bool) -> Any:
        """Run the op once more and return its results."""
        args = _fill(self.args, tensors)
        if self.kwargs or self.state is not None:
            output = _run(self.func, args, _fill_keywords(self.kwargs, tensors), self.state)
        else:
            output = self.func(*args)
        return (output,) if isinstance(output, torch.Tensor) else output


class WriteCall(_Call):
    """Runs an in-place op on a copy of the storage's old content; `view` is the layout of the part it writes."""

    __slots__ = ("view",)

    def __init__(self, func: Any, arguments: Arguments, state: GeneratorState | None, view: Layout | None) -> None:
        super().__init__(func, arguments, state)
        self.view = view

    def __call__(self, tensors: list[Any], may_overwrite_first: bool) -> tuple[torch.Tensor]:
        """Return the storage's new content."""
        base = tensors[0] if may_overwrite_first else tensors[0].clone()
        target = base if self.view is None else base.as_strided(*self.view[:3])
        args, kwargs = [target, *_fill(self.args, tensors[1:])], _fill_keywords(self.kwargs, tensors[1:])
        _run(self.func, args, kwargs, self.state)
        return (base,)


def _run(func: Any, args: list[Any], kwargs: dict[str, Any], state: GeneratorState | None) -> Any:
    """Run an op; start a random one from its generator state in forward, and restore the current state afterwards."""
    if state is None:
        return func(*args, **kwargs)
    generator, at_forward = state
    now = generator.get_state()
    generator.set_state(at_forward)
    try:
        return func(*args, **kwargs)
    finally:
        generator.set_state(now)


def generator_state(facts: OpFacts, args: Any, kwargs: dict[str, Any]) -> GeneratorState | None:
    """Return the generator that a random op is about to read, and its state; None if it reads none."""
    if facts.dropout_position is not None:
        position = facts.dropout_position
        probability = args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)
        if not probability:
            return None
    generator = kwargs.get("generator")
    if generator is None:
        generator = _default_generator(args, kwargs)
    if generator is None:
        return None
    return generator, generator.get_state()


def _default_generator(args: Any, kwargs: dict[str, Any]) -> torch.Generator | None:
    device = kwargs.get("device")
    if device is None:
        device = next((a.device for a in args if isinstance(a, torch.Tensor)), torch.get_default_device())
    device = torch.device(device)
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda" and torch.cuda.is_available():
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return None
