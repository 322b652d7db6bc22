"""Choices by index of the value: what they do not name is kept, and equal ones are equal however they were made."""

from __future__ import annotations

from recollect.plans.action import Action
from recollect.simulation.decisions import KEEP_ALL, ValueActions


def test_what_is_not_named_is_kept() -> None:
    actions = ValueActions.of({1: Action.RECOMPUTE, 2: Action.KEEP, 5: Action.RECOMPUTE})
    assert [actions.action(value) for value in range(7)] == [
        Action.RECOMPUTE if value in (1, 5) else Action.KEEP for value in range(7)
    ]
    assert actions.recomputed == {1, 5}
    assert not any(KEEP_ALL) and any(actions)


def test_equal_however_made() -> None:
    by_name = ValueActions.of({5: Action.RECOMPUTE, 1: Action.RECOMPUTE, 3: Action.KEEP})
    assert len({by_name, ValueActions.recomputing([1, 5]), ValueActions.recomputing(iter((5, 1, 5)))}) == 1
    assert len({KEEP_ALL, ValueActions.of({}), ValueActions.recomputing(()), ValueActions.of({2: Action.KEEP})}) == 1
    assert ValueActions.recomputing({1}) not in (KEEP_ALL, ValueActions.recomputing({2}))
