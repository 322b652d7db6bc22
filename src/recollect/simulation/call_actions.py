"""What a plan says about one call of a unit, by index, in the form that the simulator plays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from recollect.plans.action import Action
from recollect.plans.engines import EngineChoice, Tape

__all__ = ["KEEP_ALL", "CallActions", "ValueActions", "calls_on_tape"]


class ValueActions(NamedTuple):
    """An action for each value of a unit, as one set of values for each action; values in no set are kept.

    Sets, because the simulator looks values up at each op and compares them for each plan.

    Attributes:
        recomputed: the values with `Action.RECOMPUTE`.
        sharded: the values with `Action.SHARD`.

    Example:
        >>> actions = ValueActions.of({2: Action.RECOMPUTE, 4: Action.KEEP})
        >>> str(actions.action(2)), str(actions.action(3))
        ('recompute', 'keep')
        >>> actions == ValueActions.recomputing([2])
        True
    """

    recomputed: frozenset[int] = frozenset()
    sharded: frozenset[int] = frozenset()

    @classmethod
    def of(cls, actions: Mapping[int, Action]) -> ValueActions:
        """Return the actions in a mapping; naming a value with `Action.KEEP` is the same as not naming it."""
        recomputed = frozenset([value for value, action in actions.items() if action is Action.RECOMPUTE])
        return cls(recomputed, frozenset([value for value, action in actions.items() if action is Action.SHARD]))

    @classmethod
    def recomputing(cls, values: Iterable[int]) -> ValueActions:
        """Return the actions that recompute these values and keep all others."""
        return cls(recomputed=frozenset(values))

    def action(self, value: int) -> Action:
        """Return what happens to a value."""
        if value in self.sharded:
            return Action.SHARD
        return Action.RECOMPUTE if value in self.recomputed else Action.KEEP

    @property
    def dropped(self) -> frozenset[int]:
        """The values that are not in memory as a whole, whichever way they come back."""
        return self.recomputed | self.sharded if self.sharded else self.recomputed

    @property
    def keeps_all(self) -> bool:
        """Whether every value's action is `Action.KEEP`."""
        return not any(self)


KEEP_ALL = ValueActions()


@dataclass(frozen=True, slots=True)
class CallActions:
    """What happens to one call's values and output.

    Attributes:
        values: actions by index in the call's graph.
        output: action for what the call returns.
        is_planned: whether the plan names the unit, even if only to keep everything.
        engine: which engine carries the plan out. Engines other than the tape play the call by their own schedule
            (`recollect.simulation.simulate`) and have no actions for single values.
    """

    values: ValueActions = KEEP_ALL
    output: Action = Action.KEEP
    is_planned: bool = True
    engine: EngineChoice = Tape()


def calls_on_tape(decisions: Sequence[CallActions]) -> frozenset[int]:
    """Return the calls whose units `apply` puts on the tape: if any output is dropped or a part, all that the plan names."""
    keep = Action.KEEP
    keeps_outputs = all([decision.output is keep and not decision.values.sharded for decision in decisions])
    return frozenset(
        call
        for call, d in enumerate(decisions)
        if type(d.engine) is Tape and (any(d.values) or d.output is not keep or (d.is_planned and not keeps_outputs))
    )
