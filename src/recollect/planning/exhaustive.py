"""Every plan of a step that is so small that all of them can be tried."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations, product

from recollect.planning.hull import Option, evaluate
from recollect.planning.ladder import Ladder, Levels
from recollect.planning.segments import chains, single_outputs
from recollect.plans.action import Action
from recollect.profile.graph import UnitGraph
from recollect.profile.profile import Profile

__all__ = ["all_levels", "every_plan", "every_subset"]


def every_plan(profile: Profile, most_plans: int) -> Ladder | None:
    """Return the ladder whose levels are all plans of a step; None if there are more than `most_plans`.

    Complexity: one walk over each unit for each subset of its values.
    """
    free = single_outputs(profile) | {profile.calls[index].path for chain in chains(profile) for index in chain[:-1]}
    graph_of = {call.path: profile.graph_of(call) for call in profile.calls}
    num_plans = math.prod(2 ** len(_droppable(graph)) for graph in graph_of.values())
    return Ladder(profile, options_of=every_subset, free_outputs=free) if num_plans <= most_plans else None


def all_levels(ladder: Ladder) -> list[Levels]:
    """Return the levels of each plan of a ladder."""
    return list(product(*(range(len(rung.options)) for rung in ladder.rungs)))


def every_subset(graph: UnitGraph, *, output: Action = Action.KEEP) -> tuple[Option, ...]:
    """Return an option for each subset of a unit's values, whether they seem to be of use to this unit or not.

    What is of no use to the unit itself can be what the next unit is computed from, where the output is dropped.
    """
    droppable = _droppable(graph)
    outputs = {index for index in droppable if graph.values[index].is_output}
    fixed = {index for index, value in enumerate(graph.values) if value.must_keep}
    options = []
    for size in range(len(droppable) + 1):
        for kept in map(set, combinations(droppable, size)):
            if (output == Action.KEEP) == (outputs <= kept):
                keep = frozenset(kept | fixed)
                again = evaluate(graph, keep, output=output)
                options.append(replace(again, keep=keep))
    return tuple(sorted(options, key=lambda o: (o.kept_bytes, -o.recompute_s, sorted(o.keep))))


def _droppable(graph: UnitGraph) -> list[int]:
    return [index for index, value in enumerate(graph.values) if value.producer is not None and not value.must_keep]
