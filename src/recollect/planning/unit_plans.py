"""Turn an option of one unit into its plan: the action for each value, by name."""

from __future__ import annotations

from recollect.planning.hull import Option, part_index, whole_value
from recollect.plans.action import Action
from recollect.plans.unit_plan import UnitPlan
from recollect.profile.graph import UnitGraph

__all__ = ["unit_plan"]


def unit_plan(graph: UnitGraph, option: Option, *, output: Action = Action.KEEP) -> UnitPlan:
    """Return the plan of a unit for one option.

    "recompute" goes to results of ops that run again, unless a reader needs them kept, and "shard" to those kept as parts.
    Values that nobody needs after forward get "keep": that costs no bytes and lets the tape skip modules that compute
    nothing else. If the output is dropped, its readers may need it, so the ops that compute it run again too.
    """
    ops = option.recompute_ops | (_ops_of_outputs(graph, option) if output == Action.RECOMPUTE else frozenset())
    needed = {value for op in ops for value in graph.ops[op].inputs}
    actions: dict[str, Action] = {}
    for index, value in enumerate(graph.values):
        if value.producer is not None:
            is_kept = value.must_keep or (index in option.keep and (value.saved or index in needed))
            actions[value.name] = Action.RECOMPUTE if value.producer in ops and not is_kept else Action.KEEP
            if part_index(graph, index) in option.keep:
                actions[value.name] = Action.SHARD
    return UnitPlan(actions, output=output)


def _ops_of_outputs(graph: UnitGraph, option: Option) -> frozenset[int]:
    """Return the ops that compute the outputs of the unit from what is kept."""
    kept = {whole_value(graph, index) for index in option.keep}
    needed = {index for index, value in enumerate(graph.values) if value.is_output} - kept
    ops = set()
    for index in range(len(graph.ops) - 1, -1, -1):
        if not needed.isdisjoint(graph.ops[index].outputs):
            ops.add(index)
            needed.update(v for v in graph.ops[index].inputs if v not in kept)
    return frozenset(ops)
