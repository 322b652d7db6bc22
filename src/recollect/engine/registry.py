"""Maps each engine choice of a plan to the engine that carries it out: the one place to register a new engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from recollect.engine.engine import Engine
from recollect.engine.region_engine import RegionEngine
from recollect.engine.tape_engine import TapeEngine
from recollect.plans.engines import EngineChoice, Region, Tape

__all__ = ["ENGINES"]

ENGINES: Final[Mapping[type[EngineChoice], type[Engine]]] = {Tape: TapeEngine, Region: RegionEngine}
