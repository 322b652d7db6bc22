"""What a plan tells the simulator, and the two plans of a unit at the ends: keep everything, recompute everything."""

from __future__ import annotations

from dataclasses import replace

from recollect.plans.action import Action
from recollect.plans.engines import Region, Tape
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from recollect.plans.value_actions import ValueActions
from recollect.profile.graph import UnitGraph
from recollect.profile.profile import Profile
from recollect.simulation.call_actions import CallActions
from recollect.simulation.simulate import Simulation

__all__ = [
    "decide",
    "decide_call",
    "drop_all",
    "keep_all_unit",
    "recompute_all_unit",
    "simulated_plan",
]


# Routing indices and the like are kept on the tape and are a few percent; a unit of foreign kernels is nearly all opaque.
_OPAQUE_FRACTION = 0.5


def keep_all_unit(graph: UnitGraph) -> UnitPlan:
    """Keep whatever backward needs."""
    return UnitPlan({value.name: Action.KEEP for value in graph.values if value.producer is not None})


def recompute_all_unit(graph: UnitGraph, *, output: Action = Action.KEEP) -> UnitPlan:
    """Drop every value that can be computed again.

    A unit that mostly saves values without a recipe (compiled code, kernels that PyTorch does not see) is re-run as a
    whole instead.
    """
    saved = [value for value in graph.values if value.saved and value.producer is not None]
    opaque_bytes = sum(value.nbytes for value in saved if value.must_keep)
    if opaque_bytes > _OPAQUE_FRACTION * sum(value.nbytes for value in saved):
        return UnitPlan({}, output=output, engine=Region())
    actions: dict[str, Action] = {
        value.name: Action.KEEP if value.must_keep else Action.RECOMPUTE
        for value in graph.values
        if value.producer is not None
    }
    return UnitPlan(actions, output=output)


def decide_call(graph: UnitGraph, unit: UnitPlan | None) -> CallActions:
    """Return what happens in one call under its unit's plan; names that the plan does not have are kept."""
    if unit is None:
        return CallActions(is_planned=False)
    if type(unit.engine) is not Tape:
        return CallActions(engine=unit.engine)
    droppable = ((i, v.name) for i, v in enumerate(graph.values) if v.producer is not None and not v.must_keep)
    actions = {index: unit.actions.get(name, Action.KEEP) for index, name in droppable}
    return CallActions(ValueActions.of(actions), unit.output)


def drop_all(graph: UnitGraph) -> CallActions:
    """Return the decision of a call that drops whatever the tape can, but for its output."""
    dropped = (i for i, v in enumerate(graph.values) if v.producer is not None and not v.must_keep)
    return CallActions(ValueActions.recomputing(dropped))


def decide(profile: Profile, plan: Plan) -> list[CallActions]:
    """Return what happens in each of the profile's calls under a plan."""
    known: dict[tuple[int, int], CallActions] = {}
    decisions = []
    for call in profile.calls:
        unit = plan.units.get(call.path)
        key = (call.graph, id(unit))
        if key not in known:
            known[key] = decide_call(profile.graphs[call.graph], unit)
        decisions.append(known[key])
    return decisions


def simulated_plan(profile: Profile, plan: Plan, simulation: Simulation) -> Plan:
    """Return the plan with what the simulation predicts of it."""
    slowdown = simulation.recompute_s / profile.step_s if profile.step_s > 0 else 0.0
    return replace(
        plan,
        predicted_peak_bytes=simulation.peak_bytes,
        predicted_slowdown=slowdown,
        torch_version=profile.torch_version,
        # A fake profile is of no device: its times are modelled.
        device_name="" if profile.fake else profile.device_name,
        loss_chunks=profile.loss_chunks,
    )
