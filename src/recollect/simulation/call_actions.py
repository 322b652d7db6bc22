"""A plan's decision for one call of a unit, in the form that the simulator takes."""

from __future__ import annotations

from dataclasses import dataclass

from recollect.plans.action import Action
from recollect.plans.engines import EngineChoice, Tape
from recollect.plans.value_actions import KEEP_ALL, ValueActions

__all__ = ["CallActions"]


@dataclass(frozen=True, slots=True)
class CallActions:
    """What happens to one call's values and output.

    Attributes:
        values: actions by index in the call's graph.
        output: action for what the call returns.
        is_planned: whether the plan names the unit, even if only to keep everything.
        engine: which engine carries the plan out. Engines other than the tape play the call by their own schedule
            (`recollect.simulation.schedules`) and have no actions for single values.
    """

    values: ValueActions = KEEP_ALL
    output: Action = Action.KEEP
    is_planned: bool = True
    engine: EngineChoice = Tape()
