"""What stands in a module instance's `forward` attribute while a plan is on it, and how it gets there and goes again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from recollect.engine.apply import Applied


class PlacedForward:
    """Stands in for a module's bound `forward`; copies and pickles as the plain method, without any plan."""

    applied: Applied

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.is_on = False
        self.is_placed = False
        self.forward: Callable[..., Any] = module.forward
        # Its attributes are not copied: those of another placed forward would become this one's own.
        functools.update_wrapper(self, self.forward, updated=())  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.module, "forward")

    def put(self) -> None:
        """Place it on the module."""
        self.is_on = True
        if not self.is_placed:
            # Taken now: another forward may have been placed since this object was made.
            self.forward = self.module.forward
            self.had_own_forward = "forward" in vars(self.module)
            vars(self.module)["forward"] = self
            self.is_placed = True

    def take_off(self) -> None:
        """Give the module back what it had before."""
        self.is_on = False
        if vars(self.module).get("forward") is not self:
            return  # Somebody put their own forward around this one: it stays, and finds the module's own behind it.
        self.is_placed = False
        if self.had_own_forward:
            vars(self.module)["forward"] = self.forward
        else:
            del vars(self.module)["forward"]
