"""Turns plans into decisions for the simulator, and builds a unit's two extreme plans: keep or recompute everything."""

from __future__ import annotations

from dataclasses import replace

from recollect.plans.action import Action
from recollect.plans.engines import Region, Tape
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from recollect.plans.value_actions import ValueActions
from recollect.plans.value_names import collective_kind
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
    droppable = ((i, v.name) for i, v in enumerate(graph.values) if v.producer is not None and not v.must_keep)
    actions = {index: unit.actions.get(name, Action.KEEP) for index, name in droppable}
    return CallActions(ValueActions.of(actions), unit.output)


def drop_all(graph: UnitGraph) -> CallActions:
    """Return the decision that drops everything the tape can, except the output."""
    dropped = (i for i, v in enumerate(graph.values) if v.producer is not None and not v.must_keep)
    return CallActions(ValueActions.recomputing(dropped))


def decide(profile: Profile, plan: Plan) -> list[CallActions]:
    """Return a plan's decision for each of the profile's calls."""
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
