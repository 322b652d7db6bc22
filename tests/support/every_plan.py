"""Everything that a plan can say of a small step, each simulated."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

from recollect.plans.action import Action
from recollect.profile.graph import PartRecord, UnitGraph
from recollect.profile.profile import Profile
from recollect.simulation.decisions import CallActions, ValueActions
from recollect.simulation.simulate import simulate
from watched_modules import on_modules

Point = tuple[int, float]
"""Peak in bytes and seconds of recompute."""


def choices(graph: UnitGraph) -> Iterator[CallActions]:
    """Everything that a plan can say of a unit whose last value is its output."""
    parts = {part.value for part in graph.parts}
    can_be_dropped = [value.producer is not None and not value.must_keep for value in graph.values]
    words = [
        (Action.KEEP, *[Action.RECOMPUTE] * can_drop, *[Action.SHARD] * (index in parts))
        for index, can_drop in enumerate(can_be_dropped)
    ]
    for actions in itertools.product(*words):
        values = ValueActions.of(dict(enumerate(actions)))
        yield CallActions(values)
        if actions[-1] is Action.RECOMPUTE:
            yield CallActions(values, keeps_output=False)


def all_plans(profile: Profile) -> list[Point]:
    units = [list(choices(profile.graph_of(call))) for call in profile.calls]
    simulations = (simulate(profile, decisions) for decisions in itertools.product(*units))
    return list({(s.peak_bytes, s.recompute_s) for s in simulations})


RANKS, LATENCY_S, S_PER_BYTE = 2, 0.25, 0.01


def divided(graph: UnitGraph, rng: random.Random) -> UnitGraph:
    """The same unit, where ranks may hold parts of most values."""
    parts = []
    for index, value in enumerate(graph.values):
        can_be_part = value.producer is not None and value.nbytes and not value.must_keep and not value.mutated_later
        if can_be_part and rng.random() < 0.7:
            nbytes = -(-value.nbytes // RANKS)
            parts.append(PartRecord(index, nbytes, LATENCY_S + RANKS * nbytes * S_PER_BYTE))
    return replace(graph, parts=tuple(parts))


def in_parts(profile: Profile, seed: int) -> Profile:
    rng = random.Random(seed)
    graphs = tuple(divided(graph, rng) for graph in profile.graphs)
    return replace(profile, graphs=graphs, shard_ranks=RANKS, gather_latency_s=LATENCY_S, gather_s_per_byte=S_PER_BYTE)


def on_a_slow_tape(profile: Profile, seed: int) -> Profile:
    """The same step, where a unit that recomputes anything pays for the tape too, or for each module that it watches."""
    ops_s = max(op.time_s for graph in profile.graphs for op in graph.ops)
    if seed % 2:
        rng = random.Random(seed)
        return replace(profile, graphs=tuple(on_modules(graph, rng, most_s=ops_s) for graph in profile.graphs))
    graphs = tuple(replace(g, tape_s=ops_s * (0.5, 1.0, 4.0)[(seed + i) % 3]) for i, g in enumerate(profile.graphs))
    return replace(profile, graphs=graphs)
