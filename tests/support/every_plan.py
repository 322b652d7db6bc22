"""Everything that a plan can say of a small step, each simulated."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

from recollect.plans.action import Action
from recollect.profile.graph import UnitGraph
from recollect.profile.profile import Profile
from recollect.simulation.decisions import CallActions, ValueActions
from recollect.simulation.simulate import simulate
from watched_modules import on_modules

Point = tuple[int, float]
"""Peak in bytes and seconds of recompute."""


def choices(graph: UnitGraph) -> Iterator[CallActions]:
    """Everything that a plan can say of a unit whose last value is its output."""
    droppable = [i for i, v in enumerate(graph.values) if v.producer is not None and not v.must_keep]
    output = len(graph.values) - 1
    for size in range(len(droppable) + 1):
        for dropped in itertools.combinations(droppable, size):
            yield CallActions(ValueActions.recomputing(dropped))
            if output in dropped:
                yield CallActions(ValueActions.recomputing(dropped), output=Action.RECOMPUTE)


def all_plans(profile: Profile) -> list[Point]:
    units = [list(choices(profile.graph_of(call))) for call in profile.calls]
    simulations = (simulate(profile, decisions) for decisions in itertools.product(*units))
    return list({(s.peak_bytes, s.recompute_s) for s in simulations})


def on_a_slow_tape(profile: Profile, seed: int) -> Profile:
    """The same step, where a unit that recomputes anything pays for the tape too, or for each module that it watches."""
    ops_s = max(op.time_s for graph in profile.graphs for op in graph.ops)
    if seed % 2:
        rng = random.Random(seed)
        return replace(profile, graphs=tuple(on_modules(graph, rng, most_s=ops_s) for graph in profile.graphs))
    graphs = tuple(replace(g, tape_s=ops_s * (0.5, 1.0, 4.0)[(seed + i) % 3]) for i, g in enumerate(profile.graphs))
    return replace(profile, graphs=graphs)
