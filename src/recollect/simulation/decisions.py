"""A plan's decisions for each call of a unit, by index, as the simulator plays it; and a unit's two extreme plans."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from recollect.errors import PlanError
from recollect.plans.action import Action, EngineChoice
from recollect.plans.paths import unit_words
from recollect.plans.plan import Plan
from recollect.plans.trip import Trip
from recollect.plans.unit_plan import UnitPlan
from recollect.plans.value_names import collective_kind
from recollect.profile.graph import UnitGraph, ValueRecord
from recollect.profile.profile import Profile
from recollect.programs.unit import cut_unit


class ValueActions(NamedTuple):
    """An action for each value of a unit, as one set of values for each action; values in no set are kept.

    Sets, because the simulator looks values up at each op and compares them for each plan.
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
        return cls(recomputed=frozenset(values))

    def action(self, value: int) -> Action:
        if value in self.sharded:
            return Action.SHARD
        return Action.RECOMPUTE if value in self.recomputed else Action.KEEP

    @property
    def dropped(self) -> frozenset[int]:
        """The values not fully in memory, however they come back."""
        return self.recomputed | self.sharded if self.sharded else self.recomputed


KEEP_ALL = ValueActions()


@dataclass(frozen=True, slots=True)
class CallActions:
    """The actions for one call's values and output."""

    values: ValueActions = KEEP_ALL
    """Actions by index in the call's graph."""
    keeps_output: bool = True
    is_planned: bool = True
    """Whether the plan names the unit, even if only to keep everything."""
    engine: EngineChoice = EngineChoice.TAPE
    """The engine that carries the plan out. Engines other than the tape play the call by their own schedule
    (`recollect.simulation.simulate`), and have no actions for single values, except units that run from traces."""
    trips: tuple[tuple[int, Trip], ...] = ()
    """The trips of offloaded values, by index, in order. In `values` these are kept: stored for as long."""
    variant: int = -1
    """Of a compiled call, the index in `UnitGraph.variants`; -1 for other engines."""

    @property
    def watched(self) -> frozenset[int]:
        return self.values.dropped.union(value for value, _ in self.trips) if self.trips else self.values.dropped


def calls_on_tape(decisions: Sequence[CallActions]) -> frozenset[int]:
    """Return the calls whose units `apply` puts on the tape.

    These are all that the plan names if any output is dropped or a part, or any value is offloaded, as each unit is an edge.
    """
    tape = EngineChoice.TAPE
    keeps_outputs = all([d.keeps_output and not d.values.sharded and not d.trips for d in decisions])
    return frozenset(
        call
        for call, d in enumerate(decisions)
        if d.engine is tape and (any(d.values) or not d.keeps_output or d.trips or (d.is_planned and not keeps_outputs))
    )


def keep_all_unit(graph: UnitGraph) -> UnitPlan:
    return UnitPlan({value.name: Action.KEEP for _, value in graph.made})


def recompute_all_unit(graph: UnitGraph, *, keeps_output: bool = True) -> UnitPlan:
    """Drop every value that can be recomputed."""
    actions = {value.name: Action.KEEP if value.must_keep else Action.RECOMPUTE for _, value in graph.made}
    return UnitPlan(actions, output=Action.KEEP if keeps_output else Action.RECOMPUTE)


def recompute_unread_unit(graph: UnitGraph) -> UnitPlan:
    """Drop a single value, which backward does not read: the unit runs under its plan, and keeps what it saves."""
    made = [value for _, value in graph.made]
    unread = next(value for value in made if not (value.saved or value.must_keep or value.is_output))
    return UnitPlan({value.name: Action.RECOMPUTE if value is unread else Action.KEEP for value in made})


def decide_call(graph: UnitGraph, unit: UnitPlan | None) -> CallActions:
    """Return the decision for one call under its unit's plan; values that the plan does not name are kept."""
    if unit is None:
        return CallActions(is_planned=False)
    if unit.engine is EngineChoice.COMPILE:
        return CallActions(engine=unit.engine, variant=_variant_of(graph, unit))
    actions = {
        index: _played_action(graph, value, unit.actions.get(value.name, Action.KEEP)) for index, value in graph.made
    }
    values = ValueActions.of(actions)
    if unit.engine is EngineChoice.GRAPH and unit.recomputes_anything and cut_unit(graph, values.recomputed):
        return CallActions(values, engine=unit.engine)
    trips = [(index, unit.trips[graph.values[index].name]) for index, a in actions.items() if a is Action.OFFLOAD]
    return CallActions(values, unit.output is Action.KEEP, trips=tuple(trips))


def plain_call(graph: UnitGraph) -> CallActions:
    """Return the decision for a call without a plan: inside the compiler, if it was recorded there, else eagerly."""
    return CallActions(engine=EngineChoice.COMPILE, variant=0) if graph.variants else CallActions()


def compiled_actions(graph: UnitGraph, kept: Container[int]) -> dict[str, Action]:
    """Return the action of each value of a compiled unit, by name, if it keeps these values, by index, and its outputs."""
    return {
        value.name: Action.KEEP if index in kept or value.is_output else Action.RECOMPUTE for index, value in graph.made
    }


def compiled_unit(graph: UnitGraph, variant: int) -> UnitPlan:
    """Return the plan of a unit inside `torch.compile` that keeps what a variant keeps, by its index; 0 is PyTorch's choice."""
    if not variant:
        return UnitPlan({}, engine=EngineChoice.COMPILE)
    return UnitPlan(compiled_actions(graph, graph.variants[variant].kept), engine=EngineChoice.COMPILE)


def _variant_of(graph: UnitGraph, unit: UnitPlan) -> int:
    """Return the variant that keeps the plan's values; PyTorch's own choice if it names no value."""
    kept = {index for index, value in graph.made if not value.is_output and unit.actions.get(value.name) == Action.KEEP}
    sets = [set(variant.kept) for variant in graph.variants]
    # PyTorch's own choice comes last: it may also save intermediate steps of a value.
    if sets and not unit.actions:
        return 0
    for number in reversed(range(len(sets))):
        if sets[number] == kept:
            return number
    known = "; or ".join(", ".join(graph.values[v].name for v in variant.kept) for variant in graph.variants)
    raise PlanError(
        "cannot predict the plan: it has a unit compiled that keeps "
        f"{', '.join(graph.values[index].name for index in sorted(kept)) or 'nothing'}, "
        + (
            f"and these sets of values were recorded: {known}. Take one of them, or run the unit on the tape."
            if graph.variants
            else "and the profile knows nothing of compiled units: record it with engine='compile'."
        )
    )


def _played_action(graph: UnitGraph, value: ValueRecord, action: Action) -> Action:
    """Return the tape's action for a value that a plan names: the value is kept if the tape cannot obey."""
    is_result = value.producer is not None and graph.ops[value.producer].mutates
    if action is Action.SHARD:
        # A collective's result can be held as a part, though the collective does not run again.
        is_there = not value.must_keep or collective_kind(value.name)
        return Action.SHARD if is_there and not (is_result or value.mutated_later) else Action.KEEP
    if action is Action.OFFLOAD:
        return Action.KEEP if is_result or value.stays or not value.nbytes else action
    return Action.KEEP if value.must_keep else action


def decide(profile: Profile, plan: Plan) -> list[CallActions]:
    if profile.shard_ranks == 1:
        for path, unit in plan.units.items():
            name = next((name for name, action in unit.actions.items() if action is Action.SHARD), None)
            if name is not None:
                raise PlanError(
                    f"cannot predict the plan: {unit_words(path)} holds {name!r} as parts, one on each rank, and the profile "
                    "was recorded without. Call recollect.distribute_saved_activations(model, group) before recollect.record."
                )
    if plan.offloads:
        missing = next((call.path for call in profile.calls if call.path not in plan.units), None)
        if missing is not None:
            raise PlanError(
                f"cannot predict the plan: it offloads values, and does not name {unit_words(missing)}. Values leave and come "
                "back where units begin, of those that the plan names: name all, if only with UnitPlan({}), which keeps "
                "everything."
            )
    known: dict[tuple[int, int], CallActions] = {}
    decisions = []
    for call in profile.calls:
        planned = plan.units.get(call.path)
        key = (call.graph, id(planned))
        if key not in known:
            known[key] = decide_call(profile.graphs[call.graph], planned)
        decisions.append(known[key])
    return decisions
