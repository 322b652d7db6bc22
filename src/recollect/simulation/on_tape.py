"""Which calls of a step run on the tape under a plan, and what that costs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain

from recollect.plans.action import Action
from recollect.plans.engines import Tape
from recollect.simulation.call_actions import CallActions
from recollect.simulation.program import Program

__all__ = ["added_s", "calls_on_tape"]


def calls_on_tape(decisions: Sequence[CallActions]) -> frozenset[int]:
    """Return the calls whose units `apply` puts on the tape: if any output is dropped or a part, all that the plan names."""
    keep = Action.KEEP
    keeps_outputs = all([decision.output is keep and not decision.values.sharded for decision in decisions])
    return frozenset(
        call
        for call, d in enumerate(decisions)
        if type(d.engine) is Tape and (any(d.values) or d.output is not keep or (d.is_planned and not keeps_outputs))
    )


def added_s(
    program: Program,
    decisions: Mapping[int, CallActions] | Sequence[CallActions],
    on_tape: Collection[int],
    rerun_s: Iterable[float],
) -> float:
    """Return the seconds that a plan adds: the tape's overhead plus the ops that run again, in any order."""
    return math.fsum(chain((program.tape_s(call, decisions[call].values.dropped) for call in on_tape), rerun_s))
