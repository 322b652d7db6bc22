"""Defines the `Engine` protocol: an engine carries out the plans of the units that name it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from torch import nn

from recollect.engine.placed_forward import PlacedForward

if TYPE_CHECKING:
    from recollect.engine.agreement import Agreement
    from recollect.plans.unit_plan import UnitPlan

__all__ = ["Engine"]


class Engine(Protocol):
    """Carries out units' plans on a model; `recollect.engine.registry` maps a plan's engine choice to its class."""

    def apply(self, model: nn.Module, units: Mapping[str, UnitPlan], agreement: Agreement) -> list[PlacedForward]:
        """Return the replacements for the modules' `forward`, without placing them on the model yet.

        Args:
            model: the whole model.
            units: all of the plan's units that name this engine, by path, in forward order.
            agreement: of all ranks to run the whole plan.

        Raises:
            UnknownNameError: the model has no such unit.
        """
        ...
