"""Defines the `Engine` protocol, and lists the engines: each carries out the plans of the units that name it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from torch import nn

from recollect.engine.agreement import Agreement
from recollect.engine.placed_forward import PlacedForward
from recollect.engine.region_engine import RegionEngine
from recollect.engine.tape_engine import TapeEngine
from recollect.plans.action import EngineChoice
from recollect.plans.unit_plan import UnitPlan


class Engine(Protocol):
    """Carries out units' plans on a model; `ENGINES` maps a plan's engine choice to its class."""

    def apply(
        self, model: nn.Module, units: Mapping[str, UnitPlan], agreement: Agreement, host_bytes: int | None = None
    ) -> list[PlacedForward]:
        """Return the replacements for the modules' `forward`, without placing them on the model yet.

        Args:
            model: the whole model.
            units: all of the plan's units that name this engine, by path, in forward order.
            agreement: of all ranks to run the whole plan.
            host_bytes: host memory that offloaded values need; None if nobody knows.

        Raises:
            UnknownNameError: the model has no such unit.
        """
        ...


ENGINES: Final[Mapping[EngineChoice, type[Engine]]] = {
    EngineChoice.TAPE: TapeEngine,
    EngineChoice.REGION: RegionEngine,
}
"""The one place to register a new engine."""
