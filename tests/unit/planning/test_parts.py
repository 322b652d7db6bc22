"""Values that ranks may hold as parts: the hull, the bound and the planner against enumeration of every choice."""

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from recollect.errors import BudgetTooSmallError
from recollect.planning.bound import LowerBound
from recollect.planning.checkpoint_times import checkpoint_times
from recollect.planning.choose import Planner
from recollect.planning.hull import Evaluator, Stored, unit_hull
from recollect.planning.option_table import unit_plan
from recollect.profile.graph import OpRecord, PartRecord, UnitGraph, ValueRecord
from recollect.profile.profile import Profile
from recollect.simulation.decisions import CallActions, ValueActions
from recollect.simulation.simulate import simulate
from synthetic_step import random_step

RANKS, LATENCY_S, S_PER_BYTE = 2, 0.25, 0.01
TOLERANCE_S = 1e-6


def with_parts(graph: UnitGraph, rng: random.Random) -> UnitGraph:
    parts = []
    for index, value in enumerate(graph.values):
        if value.producer is not None and value.nbytes and not value.must_keep and not value.mutated_later:
            if rng.random() < 0.7:
                nbytes = -(-value.nbytes // RANKS)
                parts.append(PartRecord(index, nbytes, LATENCY_S + RANKS * nbytes * S_PER_BYTE))
    return replace(graph, parts=tuple(parts))


def step_of(seed: int) -> Profile:
    rng = random.Random(seed)
    num_units = 1 + seed % 2
    profile = random_step(seed, num_values=(5, 3)[num_units - 1], num_units=num_units, saved_part=0.8)
    graphs = tuple(with_parts(graph, rng) for graph in profile.graphs)
    return replace(profile, graphs=graphs, shard_ranks=RANKS, gather_latency_s=LATENCY_S, gather_s_per_byte=S_PER_BYTE)


def choices(graph: UnitGraph) -> Iterator[CallActions]:
    """Everything that a plan can say of a unit that keeps its output."""
    can_be_parts = {part.value for part in graph.parts}
    words = [
        ["keep"]
        if value.producer is None
        else ["keep", *(["recompute"] if not value.must_keep else []), *(["shard"] if i in can_be_parts else [])]
        for i, value in enumerate(graph.values)
    ]
    for chosen in itertools.product(*words):
        sets = [frozenset(i for i, word in enumerate(chosen) if word == wanted) for wanted in ("recompute", "shard")]
        yield CallActions(ValueActions(*sets))


def points_of(graph: UnitGraph) -> set[tuple[int, float]]:
    """(kept bytes, seconds) of every consistent choice of a unit without outputs, straight from the definition."""
    parts = {part.value: part for part in graph.parts}
    fixed = {value.producer for value in graph.values if value.must_keep}
    produced = [i for i, value in enumerate(graph.values) if value.producer is not None]
    saved = {i for i in produced if graph.values[i].saved}
    found = set()
    for runs in itertools.product((False, True), repeat=len(graph.ops)):
        run = {op for op, does in enumerate(runs) if does}
        if run & fixed:
            continue
        available = {i for op in run for i in graph.ops[op].outputs}
        kept = (saved | {i for op in run for i in graph.ops[op].inputs if i in produced}) - available
        recompute_s = sum(graph.ops[op].time_s for op in run)
        ways = [
            [(graph.values[i].nbytes, 0.0), *([(parts[i].nbytes, parts[i].gather_s)] if i in parts else [])]
            for i in kept
        ]
        for way in itertools.product(*ways):
            found.add((sum(nbytes for nbytes, _ in way), recompute_s + sum(seconds for _, seconds in way)))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_the_hull_is_that_of_all_choices(seed: int) -> None:
    graph = step_of(2 * seed).graphs[0]
    graph = replace(graph, values=tuple(replace(value, is_output=False) for value in graph.values))
    options = unit_hull(graph)
    points = points_of(graph)
    assert {(o.kept_bytes, round(o.recompute_s, 9)) for o in options} <= {(b, round(s, 9)) for b, s in points}
    for price in (0.0, *(10.0**power for power in range(-4, 3))):
        best_s = min(price * nbytes + seconds for nbytes, seconds in points)
        found_s = min(price * option.kept_bytes + option.recompute_s for option in options)
        assert found_s == pytest.approx(best_s, rel=1e-6)
    for option in options:
        assert option == Evaluator(graph).option(*option.stored)


def test_a_part_is_kept_where_the_whole_is_dear() -> None:
    """Between keeping 100 bytes and computing them again for 9 s: half of them, and 1 s."""
    values = (ValueRecord("x", 8, producer=None), ValueRecord("h", 100, producer=0, saved=True))
    graph = UnitGraph(values, (OpRecord("h", (0,), (1,), 9.0),), parts=(PartRecord(1, 50, 1.0),))
    options = unit_hull(graph)
    assert [(option.kept_bytes, option.recompute_s) for option in options] == [(0, 9.0), (50, 1.0), (100, 0.0)]
    assert options[1].stored == Stored(parts=frozenset([1]))
    assert [unit_plan(graph, option).actions["h"] for option in options] == ["recompute", "shard", "keep"]


def test_an_output_may_be_kept_as_a_part() -> None:
    values = (ValueRecord("x", 8, producer=None), ValueRecord("y", 100, producer=0, is_output=True))
    graph = UnitGraph(values, (OpRecord("y", (0,), (1,), 9.0),), parts=(PartRecord(1, 50, 1.0),))
    assert [(option.kept_bytes, option.recompute_s) for option in unit_hull(graph)] == [(50, 1.0), (100, 0.0)]


@pytest.mark.parametrize("seed", range(16))
def test_no_plan_is_below_the_bound_and_parts_make_none_worse(seed: int) -> None:
    profile = step_of(seed)
    units = [list(choices(profile.graph_of(call))) for call in profile.calls]
    plans = [simulate(profile, decisions) for decisions in itertools.product(*units)]
    bound, planner = LowerBound(profile), Planner(profile)
    without = Planner(replace(profile, graphs=tuple(replace(graph, parts=()) for graph in profile.graphs)))
    least, most = min(plan.peak_bytes for plan in plans), planner.plain_peak_bytes
    fixed = int(checkpoint_times(profile).fixed_bytes.max())
    for budget in sorted({fixed, *(least + (most - least) * i // 5 for i in range(6))}):
        best_s = min((plan.recompute_s for plan in plans if plan.peak_bytes <= budget), default=math.inf)
        assert bound.added_s(budget) <= best_s + TOLERANCE_S
        try:
            other = without.plan(budget)
        except BudgetTooSmallError:
            continue
        assert (planner.plan(budget).predicted_slowdown or 0.0) <= (other.predicted_slowdown or 0.0) + 1e-12


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (PartRecord(0, 4, 0.1), "part of value 0: expected a value that an op of the unit computes"),
        (PartRecord(1, -4, 0.1), "part of value 1: got -4 bytes"),
        (PartRecord(1, 4, math.nan), "part of value 1: got 4 bytes and nan s"),
    ],
)
def test_a_part_of_nothing_is_refused(part: PartRecord, message: str) -> None:
    values = (ValueRecord("x", 8, producer=None), ValueRecord("h", 8, producer=0))
    with pytest.raises(ValueError, match=message):
        UnitGraph(values, (OpRecord("h", (0,), (1,), 1.0),), parts=(part,))
