"""Lists the engines: each carries out the plans of the units that name it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from torch import nn

from recollect.engine.agreement import Agreement
from recollect.engine.placed_forward import PlacedForward
from recollect.engine.region_engine import region_forwards
from recollect.engine.tape_engine import planned_forwards
from recollect.plans.engines import EngineChoice, Region, Tape
from recollect.plans.unit_plan import UnitPlan

Engine: TypeAlias = Callable[[nn.Module, Mapping[str, UnitPlan], Agreement, int | None], list[PlacedForward]]
"""Returns the replacements for the modules' `forward` of units, without placing them on the model yet.

It takes the whole model; all of the plan's units that name this engine, by path, in forward order; the agreement of all ranks
to run the whole plan; and the host memory that offloaded values need, None if nobody knows. It raises `UnknownNameError` for a
unit that there is not.
"""

ENGINES: Final[Mapping[type[EngineChoice], Engine]] = {Tape: planned_forwards, Region: region_forwards}
"""The one place to register a new engine."""
