"""What an engine is: it carries out the plans of the units that name it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from torch import nn

from recollect.engine.placed_forward import PlacedForward

if TYPE_CHECKING:
    from recollect.plans.unit_plan import UnitPlan

__all__ = ["Engine"]


class Engine(Protocol):
    """Carries out the plans of units on a model; `recollect.engine.registry` says which engine a plan names."""

    def apply(self, model: nn.Module, units: Mapping[str, UnitPlan]) -> list[PlacedForward]:
        """Return what has to stand in for the modules' `forward`; nothing is on the model yet.

        Args:
            model: the whole model.
            units: all units of the plan that name this engine, by path, in forward order.

        Raises:
            UnknownNameError: the model has no such unit.
        """
        ...
