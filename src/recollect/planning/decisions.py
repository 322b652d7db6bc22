"""Between the three forms of a choice: a hull option, a plan that people read, and what the simulator is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeAlias

from recollect.plan import Action, Plan, UnitPlan
from recollect.planning.hull import Option
from recollect.planning.simulate import CallDecision
from recollect.profile.graph import Profile, UnitGraph

__all__ = [
    "Prediction",
    "Simulate",
    "decide",
    "decide_call",
    "drop_all",
    "keep_all_unit",
    "recompute_all_unit",
    "simulated_plan",
    "unit_plan",
]


class Prediction(Protocol):
    """What the planner reads of a simulated step."""

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at any moment."""

    @property
    def recompute_s(self) -> float:
        """Seconds spent on ops that run a second time."""

    @property
    def peak_call(self) -> str:
        """Path of the unit at the peak, or what else runs then."""


# Routing indices and the like are kept on the tape and are a few percent; a unit of foreign kernels is nearly all opaque.
_OPAQUE_FRACTION = 0.5

Simulate: TypeAlias = Callable[[Profile, Sequence[CallDecision]], Prediction]


def unit_plan(graph: UnitGraph, option: Option, *, output: Action = "keep") -> UnitPlan:
    """Write a hull option as a unit's plan.

    "recompute" is what ops compute that run again, unless it is kept for somebody. What nobody needs after forward is
    named "keep", which costs no bytes and lets the tape overlook the modules that compute nothing else. Of an output that
    is dropped, somebody else may have need: the ops that it takes run again as well.
    """
    ops = option.recompute_ops | (_ops_of_outputs(graph, option) if output == "recompute" else frozenset())
    needed = {value for op in ops for value in graph.ops[op].inputs}
    actions: dict[str, Action] = {}
    for index, value in enumerate(graph.values):
        if value.producer is not None:
            is_kept = value.must_keep or (index in option.keep and (value.saved or index in needed))
            actions[value.name] = "recompute" if value.producer in ops and not is_kept else "keep"
    return UnitPlan(actions, output=output)


def _ops_of_outputs(graph: UnitGraph, option: Option) -> frozenset[int]:
    """Return the ops that compute the unit's outputs from what is kept."""
    needed = {index for index, value in enumerate(graph.values) if value.is_output} - option.keep
    ops = set()
    for index in range(len(graph.ops) - 1, -1, -1):
        if not needed.isdisjoint(graph.ops[index].outputs):
            ops.add(index)
            needed.update(v for v in graph.ops[index].inputs if v not in option.keep)
    return frozenset(ops)


def keep_all_unit(graph: UnitGraph) -> UnitPlan:
    """Keep whatever backward needs."""
    return UnitPlan({value.name: "keep" for value in graph.values if value.producer is not None})


def recompute_all_unit(graph: UnitGraph, *, output: Action = "keep") -> UnitPlan:
    """Drop every value that can be computed again.

    A unit that mostly saves values without a recipe (compiled code, kernels that PyTorch does not see) is re-run as a
    whole instead.
    """
    saved = [value for value in graph.values if value.saved and value.producer is not None]
    opaque_bytes = sum(value.nbytes for value in saved if value.must_keep)
    if opaque_bytes > _OPAQUE_FRACTION * sum(value.nbytes for value in saved):
        return UnitPlan({}, output=output, engine="region")
    actions: dict[str, Action] = {
        value.name: "keep" if value.must_keep else "recompute" for value in graph.values if value.producer is not None
    }
    return UnitPlan(actions, output=output)


def decide_call(graph: UnitGraph, unit: UnitPlan | None) -> CallDecision:
    """Return what one call drops under its unit's plan; names that the plan does not have are kept."""
    if unit is None:
        return CallDecision(recompute=frozenset(), keep_output=True, is_planned=False)
    dropped = frozenset(
        index
        for index, value in enumerate(graph.values)
        if value.producer is not None
        and (unit.engine == "region" or (not value.must_keep and unit.actions.get(value.name, "keep") == "recompute"))
    )
    return CallDecision(recompute=dropped, keep_output=unit.output == "keep")


def drop_all(graph: UnitGraph) -> CallDecision:
    """Return the decision of a call that drops whatever the tape can, but for its output."""
    return CallDecision(frozenset(i for i, v in enumerate(graph.values) if v.producer is not None and not v.must_keep))


def decide(profile: Profile, plan: Plan) -> list[CallDecision]:
    """Return what each of the profile's calls drops under a plan."""
    known: dict[tuple[int, int], CallDecision] = {}
    decisions = []
    for call in profile.calls:
        unit = plan.units.get(call.path)
        key = (call.graph, id(unit))
        if key not in known:
            known[key] = decide_call(profile.graphs[call.graph], unit)
        decisions.append(known[key])
    return decisions


def simulated_plan(profile: Profile, plan: Plan, simulation: Prediction) -> Plan:
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
