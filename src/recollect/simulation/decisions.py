"""Turns plans into decisions for the simulator, and builds a unit's two extreme plans: keep or recompute everything."""

from __future__ import annotations

from dataclasses import replace

from recollect.errors import PlanError
from recollect.plans.action import Action
from recollect.plans.engines import Region, Tape
from recollect.plans.paths import unit_words
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from recollect.plans.value_names import collective_kind
from recollect.profile.graph import UnitGraph, ValueRecord
from recollect.profile.profile import Profile
from recollect.simulation.call_actions import CallActions, ValueActions
from recollect.simulation.simulate import Simulation

__all__ = [
    "decide",
    "decide_call",
    "drop_all",
    "keep_all_unit",
    "recompute_all_unit",
    "simulated_plan",
]


# The tape keeps routing indices and the like, a few percent of a unit; a unit of foreign kernels is almost all opaque.
_OPAQUE_FRACTION = 0.5


def keep_all_unit(graph: UnitGraph) -> UnitPlan:
    """Keep everything that backward needs."""
    return UnitPlan({value.name: Action.KEEP for value in graph.values if value.producer is not None})


def recompute_all_unit(graph: UnitGraph, *, output: Action = Action.KEEP) -> UnitPlan:
    """Drop every value that can be recomputed.

    A unit that mostly saves values without a recipe (compiled code, kernels invisible to PyTorch) is re-run as a whole
    instead.
    """
    saved = [value for value in graph.values if value.saved and value.producer is not None]
    # Not collectives: the tape sees them, and a module that is re-run as a whole would run them again.
    opaque_bytes = sum(value.nbytes for value in saved if value.must_keep and not collective_kind(value.name))
    if opaque_bytes > _OPAQUE_FRACTION * sum(value.nbytes for value in saved):
        return UnitPlan({}, output=output, engine=Region())
    actions: dict[str, Action] = {
        value.name: Action.KEEP if value.must_keep else Action.RECOMPUTE
        for value in graph.values
        if value.producer is not None
    }
    return UnitPlan(actions, output=output)


def decide_call(graph: UnitGraph, unit: UnitPlan | None) -> CallActions:
    """Return the decision for one call under its unit's plan; values that the plan does not name are kept."""
    if unit is None:
        return CallActions(is_planned=False)
    if type(unit.engine) is not Tape:
        return CallActions(engine=unit.engine)
    actions = {
        index: _played_action(graph, value, unit.actions.get(value.name, Action.KEEP))
        for index, value in enumerate(graph.values)
        if value.producer is not None
    }
    return CallActions(ValueActions.of(actions), unit.output)


def _played_action(graph: UnitGraph, value: ValueRecord, action: Action) -> Action:
    """Return what the tape does with a value for which a plan says something: what it cannot do otherwise, it keeps."""
    if action is Action.SHARD:
        # What a collective made can be held as a part, though it does not run again.
        is_there = not value.must_keep or collective_kind(value.name)
        is_written = value.mutated_later or (value.producer is not None and graph.ops[value.producer].mutates)
        return Action.SHARD if is_there and not is_written else Action.KEEP
    return Action.KEEP if value.must_keep else action


def drop_all(graph: UnitGraph) -> CallActions:
    """Return the decision that drops everything the tape can, except the output."""
    dropped = (i for i, v in enumerate(graph.values) if v.producer is not None and not v.must_keep)
    return CallActions(ValueActions.recomputing(dropped))


def decide(profile: Profile, plan: Plan) -> list[CallActions]:
    """Return a plan's decision for each of the profile's calls.

    Raises:
        PlanError: the plan holds values as parts, and the profile does not know of ranks that hold them.
    """
    if profile.shard_ranks == 1:
        _check_no_shards(plan)
    known: dict[tuple[int, int], CallActions] = {}
    decisions = []
    for call in profile.calls:
        unit = plan.units.get(call.path)
        key = (call.graph, id(unit))
        if key not in known:
            known[key] = decide_call(profile.graphs[call.graph], unit)
        decisions.append(known[key])
    return decisions


def _check_no_shards(plan: Plan) -> None:
    for path, unit in plan.units.items():
        name = next((name for name, action in unit.actions.items() if action is Action.SHARD), None)
        if name is not None:
            raise PlanError(
                f"cannot predict the plan: {unit_words(path)} holds {name!r} as parts, one on each rank, and the profile was "
                "recorded without. Call recollect.distribute_saved_activations(model, group) before recollect.record."
            )


def simulated_plan(profile: Profile, plan: Plan, simulation: Simulation) -> Plan:
    """Return the plan with the simulation's predictions filled in."""
    slowdown = simulation.recompute_s / profile.step_s if profile.step_s > 0 else 0.0
    return replace(
        plan,
        predicted_peak_bytes=simulation.peak_bytes,
        predicted_slowdown=slowdown,
        torch_version=profile.torch_version,
        # A fake profile belongs to no device: its times are modelled.
        device_name="" if profile.fake else profile.device_name,
        loss_chunks=profile.loss_chunks,
    )
