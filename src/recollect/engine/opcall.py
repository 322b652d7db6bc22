"""Runs one recorded op again, with its arguments, its random numbers and, if it writes in place, its target.

It runs under the settings that it ran under in forward: switches of kernels, default dtype, dispatch modes. Function modes need
nothing: they act on calls before these become ops, which the tape records.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from recollect._torch_parallel import name_of_group, waited_for
from recollect._torch_private import dispatch_mode_stack, replaced_dispatch_modes
from recollect._torch_settings import kernel_switches
from recollect.engine.draws import Draw
from recollect.engine.facts import OpFacts
from recollect.engine.together import Agreement
from recollect.engine.values import Layout, TapeValue
from recollect.errors import ConfigError

# The smallest normal number: half of it is zero where denormal numbers are flushed. There is no getter for that.
_SMALLEST_NORMAL = 2.2250738585072014e-308
# Checked before `isinstance(argument, torch.Tensor)`, which is slow for anything that is not a tensor.
_CONSTANTS = frozenset(
    {int, float, bool, type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format}
)


def _flushes_denormals() -> bool:
    return not _SMALLEST_NORMAL * 0.5


def _set_deterministic(is_on: bool) -> None:
    torch.use_deterministic_algorithms(is_on, warn_only=torch.is_deterministic_algorithms_warn_only_enabled())


_SWITCHES: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (_flushes_denormals, torch.set_flush_denormal),
    (torch.are_deterministic_algorithms_enabled, _set_deterministic),
    *kernel_switches(),
]
_GETTERS = tuple(get for get, _ in _SWITCHES)


@dataclass(slots=True, eq=False)
class Settings:
    """The context that a unit's ops ran in."""

    values: tuple[Any, ...]
    """Of `_SWITCHES`, in order."""
    modes: tuple[Any, ...]
    """The user's own dispatch modes around the unit, outermost first. PyTorch's modes (counting, fake tensors) act the
    same on an op's first run and on later ones."""

    def at_op(self, facts: OpFacts) -> Settings:
        """Return those that an op runs under, if its unit began with these and may have changed them since."""
        # Any op may follow these: default dtype, denormal numbers, deterministic algorithms.
        general = torch.get_default_dtype(), _flushes_denormals(), torch.are_deterministic_algorithms_enabled()
        if facts.follows_settings or self.values[:3] != general:
            return current_settings(self.modes)
        return self

    def has(self, values: tuple[Any, ...], modes: tuple[Any, ...]) -> bool:
        return self.values == values and self.modes == modes

    @contextmanager
    def applied(self, now: Settings) -> Iterator[None]:
        """Set everything that differs from `now`, and restore it afterwards."""
        differing = [
            (switch, wanted, found)
            for switch, wanted, found in zip(_SWITCHES, self.values, now.values, strict=True)
            if wanted != found
        ]
        try:
            for (get, change), wanted, _ in differing:
                change(wanted)
                if get() != wanted:
                    raise ConfigError(
                        settings={_name_of(get): get()},
                        reason=f"it was {wanted!r} in forward, and could not be restored to recompute a value",
                        advice="Do not change it between forward and backward.",
                    )
            if self.modes == now.modes:
                yield
            else:
                stack = [mode for mode in dispatch_mode_stack() if not _is_users(mode)]
                with replaced_dispatch_modes([*stack, *self.modes]):
                    yield
        finally:
            for (_, change), _, found in differing:
                change(found)


# Of ops that run below all dispatch modes.
NO_MODES: Final = ()

_last = Settings((), ())
_here = threading.local()


def current_settings(modes: tuple[Any, ...] | None = None) -> Settings:
    """Return the current context; the same object as the last time if nothing has changed.

    `modes`: the user's dispatch modes around the running unit; by default, those that are active now.
    """
    global _last  # noqa: PLW0603 - a cache: if threads take turns with different settings, each makes its own
    values = tuple([get() for get in _GETTERS])
    if modes is None:
        modes = tuple([mode for mode in dispatch_mode_stack() if _is_users(mode)])
    last = _last
    if not last.has(values, modes):
        last = _last = Settings(values, modes)
    return last


class Replaying:
    """Notes the settings in force while values are computed again on this thread, within a with-block."""

    # A class, because a generator takes 1 us more, for every value that backward asks for.
    __slots__ = ("_outer",)

    def __enter__(self) -> None:
        self._outer = getattr(_here, "settings", None)
        _here.settings = current_settings()

    def __exit__(self, *error: object) -> None:
        _here.settings = self._outer


def is_replaying() -> bool:
    return getattr(_here, "settings", None) is not None


def hold_here(settings: Settings) -> bool:
    """Whether these settings hold where values are being computed again on this thread."""
    now: Settings | None = getattr(_here, "settings", None)
    return now is None or settings is now or settings.has(now.values, now.modes)


def _name_of(get: Any) -> str:
    return str(getattr(get, "__name__", None) or f"{get.func.__name__}{get.args}")


def _is_users(mode: Any) -> bool:
    return type(mode).__module__.partition(".")[0] not in ("torch", "recollect")


@dataclass(slots=True, eq=False)
class _Slot:
    """Stands for the call's tensor argument number `index`."""

    index: int


# Most ops have at most three tensors; these slots are made once and shared.
_FIRST_SLOTS = tuple(_Slot(index) for index in range(8))


class _Unread(NamedTuple):
    """Stands for a tensor argument whose content the op does not read; needs no bytes, whatever is written to it later."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def tensor(self) -> torch.Tensor:
        return torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape)


class _Slots(list[Any]):
    """A list argument (`cat`, `index`) that contains tensors."""


class Arguments:
    """The arguments of a recorded op: tensors as values (`values`, in slot order), everything else unchanged."""

    __slots__ = ("args", "kwargs", "values")

    def __init__(
        self, value_of: Callable[[torch.Tensor], TapeValue], facts: OpFacts, args: Any, kwargs: dict[str, Any]
    ) -> None:
        self.values: list[TapeValue] = []
        if hidden := facts.updated_by(args):
            args = [None if position in hidden else a for position, a in enumerate(args)]
        if facts.ignores_first(args, kwargs):
            self.args = [_Unread(args[0].shape, args[0].dtype, args[0].device), *self._bind(args[1:], value_of)]
        else:
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
                index = len(values)
                bound.append(_FIRST_SLOTS[index] if index < len(_FIRST_SLOTS) else _Slot(index))
                values.append(value_of(argument))
            elif isinstance(argument, (list, tuple)) and any(isinstance(a, torch.Tensor) for a in argument):
                bound.append(_Slots(self._bind(argument, value_of)))
            else:
                bound.append(argument)
        return bound


def _fill(arguments: list[Any], tensors: list[Any]) -> list[Any]:
    filled = []
    for a in arguments:
        kind = type(a)
        if kind is _Slot:
            filled.append(tensors[a.index])
        elif kind is _Slots:
            filled.append(_fill(a, tensors))
        else:
            filled.append(a.tensor() if kind is _Unread else a)
    return filled


def _fill_keywords(kwargs: dict[str, Any], tensors: list[Any]) -> dict[str, Any]:
    return dict(zip(kwargs, _fill(list(kwargs.values()), tensors), strict=True)) if kwargs else kwargs


class _Call:
    __slots__ = ("args", "draw", "func", "kwargs", "settings")

    def __init__(self, func: Any, arguments: Arguments, draw: Draw | None, settings: Settings) -> None:
        self.func = func
        self.settings = settings
        self.args, self.kwargs = arguments.args, arguments.kwargs
        self.draw = draw

    @property
    def state_bytes(self) -> int:
        return 0 if self.draw is None else self.draw.nbytes

    def _run(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if hold_here(self.settings):
            return self._run_here(args, kwargs)
        with self.settings.applied(_here.settings):
            return self._run_here(args, kwargs)

    def _run_here(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return self.func(*args, **kwargs) if self.draw is None else self.draw.again(self.func, args, kwargs)


class OpCall(_Call):
    """Runs an op that makes new tensors."""

    __slots__ = ()

    def __call__(self, tensors: list[Any], may_overwrite_first: bool) -> Any:
        args, kwargs = _fill(self.args, tensors), _fill_keywords(self.kwargs, tensors)
        output = self._run(args, kwargs)
        return (output,) if isinstance(output, torch.Tensor) else output


class CollectiveCall(OpCall):
    """Runs a collective and waits for its result: forward waited in a separate op."""

    __slots__ = ("agreement",)

    def __init__(self, func: Any, arguments: Arguments, settings: Settings, agreement: Agreement) -> None:
        super().__init__(func, arguments, None, settings)
        self.agreement = agreement

    def __call__(self, tensors: list[Any], may_overwrite_first: bool) -> Any:
        self.agreement.check(name_of_group(self.args, self.kwargs), f"run {self.func} again in backward")
        return [waited_for(result) for result in super().__call__(tensors, may_overwrite_first)]


class WriteCall(_Call):
    """Runs an in-place op on a copy of the storage's old content; `view` is the layout of the part it writes."""

    __slots__ = ("view",)

    def __init__(self, func: Any, arguments: Arguments, view: Layout | None, settings: Settings) -> None:
        super().__init__(func, arguments, None, settings)  # It is described before it runs.
        self.view = view

    def __call__(self, tensors: list[Any], may_overwrite_first: bool) -> tuple[torch.Tensor]:
        """Return the storage's new content."""
        base = tensors[0] if may_overwrite_first else tensors[0].clone()
        target = base if self.view is None else base.as_strided(*self.view[:3])
        args, kwargs = [target, *_fill(self.args, tensors[1:])], _fill_keywords(self.kwargs, tensors[1:])
        self._run(args, kwargs)
        return (base,)
