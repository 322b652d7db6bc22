"""Has ops run again under the settings that they ran under in forward: switches of kernels, default dtype, dispatch modes.

Function modes need nothing: they act on what is called before it becomes ops, which is what the tape records.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from recollect._torch_private import dispatch_mode_stack, kernel_switches, replaced_dispatch_modes
from recollect.errors import ConfigError

# The smallest normal number: half of it is zero where denormal numbers are flushed. There is no getter for that.
_SMALLEST_NORMAL = 2.2250738585072014e-308


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
    """What the ops of a unit ran under.

    Attributes:
        values: of `_SWITCHES`, in order.
        modes: the user's own dispatch modes around the unit, outermost first. What PyTorch's modes do (counting, fake tensors)
            does not depend on whether an op runs for the first time.
    """

    values: tuple[Any, ...]
    modes: tuple[Any, ...]

    def has(self, values: tuple[Any, ...], modes: tuple[Any, ...]) -> bool:
        """Whether these are the same settings."""
        return self.values == values and self.modes == modes

    @contextmanager
    def applied(self, now: Settings) -> Iterator[None]:
        """Set all that differs from `now`, and set it back afterwards.

        Raises:
            ConfigError: a switch is not what it was set to.
        """
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
                        reason=f"it was {wanted!r} in forward, and could not be set to that again to recompute a value",
                        advice="Leave it as it is between forward and backward.",
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


_last = Settings((), ())
_here = threading.local()


def current_settings(modes: tuple[Any, ...] | None = None) -> Settings:
    """Return what holds now; the same object as the last time, if nothing has changed.

    Args:
        modes: the user's dispatch modes around the running unit; by default, those that are active now.
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
    """Notes what holds while values are computed again on this thread, within a with-block."""

    # A class, because a generator takes 1 us more, for every value that backward asks for.
    __slots__ = ("_outer",)

    def __enter__(self) -> None:
        self._outer = getattr(_here, "settings", None)
        _here.settings = current_settings()

    def __exit__(self, *error: object) -> None:
        _here.settings = self._outer


def hold_here(settings: Settings) -> bool:
    """Whether these settings hold where values are being computed again on this thread."""
    now: Settings | None = getattr(_here, "settings", None)
    return now is None or settings is now or settings.has(now.values, now.modes)


def applied_here(settings: Settings) -> AbstractContextManager[None]:
    """Have these settings hold for one op of those that are computed again on this thread."""
    return settings.applied(_here.settings)


def _name_of(get: Any) -> str:
    return str(getattr(get, "__name__", None) or f"{get.func.__name__}{get.args}")


def _is_users(mode: Any) -> bool:
    return type(mode).__module__.partition(".")[0] not in ("torch", "recollect")
