"""What a plan adds to the time and the memory of a step, worked out by hand for small units."""

from dataclasses import replace
from typing import Any

import pytest

from recollect.errors import PlanError
from recollect.planning.explain import layer_usage
from recollect.plans.action import Action
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from recollect.profile.events import BACKWARD, DIES, FORWARD, OP, PHASE, RELEASE, RETURN, SAVE, USE, StepLog
from recollect.profile.graph import OpRecord, UnitCall, UnitGraph, ValueRecord
from recollect.profile.profile import Profile
from recollect.simulation.decisions import KEEP_ALL, ValueActions, decide
from recollect.simulation.simulate import Simulation, simulate
from recollect.simulation.windows import windows
from toy_profile import layer, stack

A, B, OUT = 100, 30, 20

WRITES_TO_A = UnitGraph(
    (
        ValueRecord("input 0", 8, producer=None),
        ValueRecord("a", A, producer=0, mutated_later=True),
        ValueRecord("b", B, producer=1, saved=True),
        ValueRecord("a_", A, producer=2),
        ValueRecord("out", OUT, producer=3, is_output=True),
    ),
    (
        OpRecord("a", (0,), (1,), 1.0),
        OpRecord("b", (1,), (2,), 2.0),
        OpRecord("a_", (1,), (3,), 4.0, mutates=True),
        OpRecord("out", (3,), (4,), 8.0),
    ),
)
STEP_OF_IT = (
    (PHASE, FORWARD),
    (OP, 0, 0),
    (OP, 0, 1),
    (SAVE, 0, 2, 0, 0),
    (DIES, 0, 2),
    (OP, 0, 2),
    (OP, 0, 3),
    (DIES, 0, 3),
    (RETURN, 0),
    (PHASE, BACKWARD),
    (USE, 0),
    (RELEASE, 0),
)


def played(profile: Profile, plan: Plan) -> Simulation:
    return simulate(profile, decide(profile, plan))


def test_what_runs_again_runs_in_each_of_the_runs_that_a_call_stands_for() -> None:
    profile, plan = stack(2), Plan({"layers.0": UnitPlan({"mlp.act.silu": "recompute"})})
    calls = [replace(call, num_runs=3) if call.path == "layers.0" else call for call in profile.calls]
    once, thrice = played(profile, plan), played(replace(profile, calls=tuple(calls)), plan)
    assert (once.recomputed_ops, thrice.recomputed_ops) == (1, 3)
    assert thrice.recompute_s == pytest.approx(3 * once.recompute_s)
    assert once.recompute_s == 0.02


def test_what_a_recipe_reads_is_copied_before_an_op_writes_to_it() -> None:
    """`b` can run again only from `a` as it was, of which the tape then holds a copy besides what was written."""
    profile = Profile((WRITES_TO_A,), (UnitCall("layer", 0),), StepLog(STEP_OF_IT), step_s=30.0)
    kept, dropped = played(profile, Plan({})), played(profile, Plan({"layer": UnitPlan({"b": "recompute"})}))
    assert kept.kept_bytes == B + OUT
    assert dropped.kept_bytes == A + OUT
    assert dropped.forward_peak_bytes == A + A + OUT
    assert dropped.backward_peak_bytes == A + OUT + B


def test_the_time_of_a_layer_includes_what_watching_it_takes() -> None:
    profile = stack(2)
    profile = replace(profile, graphs=tuple(replace(graph, tape_s=0.5) for graph in profile.graphs))
    plan = Plan({"layers.0": UnitPlan({"mlp.act.silu": "recompute"})})
    usage = {layer.path: layer.recompute_s for layer in layer_usage(profile, plan)}
    assert usage == {"embed": 0.0, "layers.0": 0.02 + 0.5, "layers.1": 0.0, "head": 0.0}
    assert sum(usage.values()) == played(profile, plan).recompute_s
    away = Plan(
        {call.path: UnitPlan({}) for call in profile.calls} | {"layers.0": UnitPlan({"mlp.act.silu": "offload"})}
    )
    watched = tuple(replace(graph, module_tape_s=(("mlp.act", 0.25),)) for graph in profile.graphs)
    profile = replace(profile, graphs=watched)
    assert sum(layer.recompute_s for layer in layer_usage(profile, away)) == played(profile, away).recompute_s == 2.25


def test_backward_goes_through_the_calls_from_the_last_to_the_first() -> None:
    profile = stack(3)
    paths = [profile.calls[window.call].path for window in windows(profile) if window.phase == BACKWARD]
    assert paths == ["head", "layers.2", "layers.1", "layers.0", "embed"]


# Choices by index of the value.


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
