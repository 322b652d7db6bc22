"""Choices by index of the value: what they do not name is kept, what the tape cannot do is played as it will be done."""

from dataclasses import replace
from typing import Any

import pytest

from recollect.errors import PlanError
from recollect.plans.action import Action
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from recollect.profile.profile import Profile
from recollect.simulation.decisions import KEEP_ALL, ValueActions, decide
from toy_profile import layer, stack


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


def test_what_the_tape_has_to_keep_stays_whatever_a_plan_says() -> None:
    graph = layer()
    values = [replace(value, must_keep=value.name == "mlp.up.mm") for value in graph.values]
    profile = stack(1, graph=replace(graph, values=tuple(values)))
    made = decide(profile, Plan({"layers.0": UnitPlan({"norm.mul": "recompute", "mlp.up.mm": "recompute"})}))
    assert made[1].values == ValueActions.recomputing({1})


@pytest.mark.parametrize(
    ("fields", "is_away"),
    [({}, True), ({"must_keep": True}, True), ({"stays": True}, False), ({"nbytes": 0}, False)],
    ids=["can be recomputed", "cannot be recomputed", "is filled by others", "is empty"],
)
def test_what_cannot_be_recomputed_can_be_offloaded_unless_others_fill_it(
    fields: dict[str, Any], is_away: bool
) -> None:
    graph = layer()
    values = [replace(value, **fields) if value.name == "mlp.up.mm" else value for value in graph.values]
    profile = stack(1, graph=replace(graph, values=tuple(values)))
    units = {call.path: UnitPlan({}) for call in profile.calls} | {"layers.0": UnitPlan({"mlp.up.mm": "offload"})}
    made = decide(profile, Plan(units))
    assert [value for value, _ in made[1].trips] == [2] * is_away
    assert Profile.from_json(profile.to_json()) == profile
    assert ('"stays"' in profile.to_json()) == ("stays" in fields)


def test_a_plan_with_parts_needs_a_profile_of_several_ranks() -> None:
    profile, plan = stack(2), Plan({"layers.0": UnitPlan({"mlp.up.mm": "shard"})})
    with pytest.raises(PlanError, match=r"layers\.0.* holds 'mlp\.up\.mm' as parts.*recorded without"):
        decide(profile, plan)
    assert decide(replace(profile, shard_ranks=2), plan)[1].values.sharded == {2}


def test_a_plan_that_offloads_names_all_units() -> None:
    profile, unit = stack(2), UnitPlan({"mlp.up.mm": "offload"})
    with pytest.raises(
        PlanError, match=r"offloads values, and does not name unit 'embed'.*name all, if only with UnitPlan"
    ):
        decide(profile, Plan({"layers.0": unit}))
    named = {call.path: UnitPlan({}) for call in profile.calls} | {"layers.0": unit}
    assert [len(decision.trips) for decision in decide(profile, Plan(named))] == [0, 1, 0, 0]
