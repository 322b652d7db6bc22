"""What a plan does with one call of a unit: what the simulator is told of it."""

from __future__ import annotations

from dataclasses import dataclass

from recollect.plans.action import Action
from recollect.plans.engines import EngineChoice, Tape
from recollect.plans.value_actions import KEEP_ALL, ValueActions

__all__ = ["CallActions"]


@dataclass(frozen=True, slots=True)
class CallActions:
    """What happens to the values of one call, and to its output.

    Attributes:
        values: by index in the call's graph.
        output: what happens to what the call returns.
        is_planned: the plan names the unit, if only to keep everything.
        engine: what carries the plan out; one other than the tape plays the call by a schedule of its own
            (`recollect.simulation.schedules`), and has no actions for single values.
    """

    values: ValueActions = KEEP_ALL
    output: Action = Action.KEEP
    is_planned: bool = True
    engine: EngineChoice = Tape()
