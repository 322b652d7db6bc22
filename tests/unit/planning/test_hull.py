"""The hull of one unit: against enumeration of every choice, and its special cases one by one."""

import itertools
import random
from dataclasses import replace

import pytest

from every_plan import divided
from recollect.planning.hull import Evaluator, Option, unit_hull
from recollect.profile.graph import OpRecord, PartRecord, UnitGraph, ValueRecord
from watched_modules import on_modules


def random_graph(rng: random.Random, *, num_values: int, single_output: bool = False) -> UnitGraph:
    """A random unit with multi-output ops, must-keep and mutated values; whole-number costs, so that sums are exact."""
    values = [ValueRecord("leaf", 8, producer=None, saved=rng.random() < 0.5)]
    if rng.random() < 0.5:
        values.append(ValueRecord("written leaf", 8, producer=None, mutated_later=rng.random() < 0.5))
    ops: list[OpRecord] = []
    while len(values) < num_values:
        readable = range(len(values))
        inputs = tuple(rng.choices(readable[-4:], k=rng.randint(1, 3)))
        outputs = range(len(values), len(values) + (1 if single_output else rng.choice((1, 1, 1, 2))))
        for index in outputs:
            saved = rng.random() < 0.5
            values.append(
                ValueRecord(
                    f"op{len(ops)}.{index}",
                    nbytes=rng.choice((0, 1, 2, 4, 8, 64, 100)),
                    producer=len(ops),
                    must_keep=rng.random() < 0.15,
                    saved=saved,
                    is_output=len(values) >= num_values - 2 and rng.random() < 0.6,
                    mutated_later=not saved and rng.random() < 0.15,
                )
            )
        ops.append(OpRecord(f"op{len(ops)}", inputs, tuple(outputs), time_s=float(rng.choice((0, 1, 2, 3, 10, 50)))))
    return UnitGraph(tuple(values), tuple(ops))


def all_points(graph: UnitGraph, keeps_output: bool) -> set[tuple[int, float]]:
    """(kept bytes, recompute seconds) of every consistent choice, straight from the definition."""
    points = set()
    fixed = {v.producer for v in graph.values if v.must_keep}
    lost = {i for i, v in enumerate(graph.values) if v.producer is None and v.mutated_later}
    runnable = [i for i, op in enumerate(graph.ops) if i not in fixed and not lost & set(op.inputs)]
    produced = [i for i, v in enumerate(graph.values) if v.producer is not None]
    outputs = {i for i in produced if keeps_output and graph.values[i].is_output}
    keepable = [i for i in produced if graph.values[i].saved or not graph.values[i].mutated_later]
    base_bytes = sum(graph.values[i].nbytes for i in outputs)
    for mask in itertools.product((False, True), repeat=len(runnable)):
        run = {op for op, runs in zip(runnable, mask, strict=True) if runs}
        leaves = {i for i, v in enumerate(graph.values) if v.producer is None}
        available = leaves | {i for op in run for i in graph.ops[op].outputs} | (outputs & set(keepable))
        # What the ops and backward ask for and nothing else provides has to be kept.
        asked = {i for i in produced if graph.values[i].saved} | {i for op in run for i in graph.ops[op].inputs}
        kept = asked - available
        if not kept <= set(keepable):
            continue
        tape_s = graph.watched_s(i for op in run for i in graph.ops[op].outputs) if run else 0.0
        run_s = tape_s + sum(graph.ops[op].time_s for op in run)
        # Whole, or a part of it that is gathered again.
        ways = [
            [(graph.values[i].nbytes, 0.0), *[(p.nbytes, p.gather_s) for p in graph.parts if p.value == i]]
            for i in kept
        ]
        for way in itertools.product(*ways):
            points.add((base_bytes + sum(nbytes for nbytes, _ in way), run_s + sum(seconds for _, seconds in way)))
    return points


def lower_hull(points: set[tuple[int, float]]) -> list[tuple[int, float]]:
    """Vertices of the lower left convex hull, by the monotone chain."""
    hull: list[tuple[int, float]] = []
    for point in sorted(points):
        if hull and point[1] >= hull[-1][1]:
            continue
        while len(hull) >= 2:
            (x0, y0), (x1, y1) = hull[-2:]
            if (y1 - y0) * (point[0] - x0) < (point[1] - y0) * (x1 - x0):
                break
            hull.pop()
        hull.append(point)
    return hull


@pytest.mark.parametrize("keeps_output", [True, False])
def test_equals_enumeration(keeps_output: bool) -> None:
    for seed in range(200):
        rng = random.Random(seed)
        graph = random_graph(rng, num_values=rng.randint(2, 10))
        if seed >= 100:
            graph = on_modules(graph, rng)
        options = unit_hull(graph, keeps_output=keeps_output)
        expected = lower_hull(all_points(graph, keeps_output))
        found = [(option.kept_bytes, option.recompute_s) for option in options]
        # Keeping everything ends the list even where ops cost no time and something leaner is as fast.
        if found[-1] not in expected:
            assert options[-1] == Evaluator(graph, keeps_output=keeps_output).option(range(len(graph.values))), seed
            found.pop()
        assert found == expected, seed


def chain(*, bytes_and_seconds: list[tuple[int, float]], **flags: dict[str, bool]) -> UnitGraph:
    """x -> v1 -> v2 ...; `flags` by value name; every value is saved unless its flags say otherwise."""
    values = [ValueRecord("x", 1, producer=None)]
    ops = []
    for index, (nbytes, time_s) in enumerate(bytes_and_seconds):
        name = f"v{index + 1}"
        values.append(ValueRecord(name, nbytes, producer=index, **{"saved": True, **flags.get(name, {})}))
        ops.append(OpRecord(name, (index,), (index + 1,), time_s))
    return UnitGraph(tuple(values), tuple(ops))


def points(options: tuple[Option, ...]) -> list[tuple[int, float]]:
    return [(option.kept_bytes, option.recompute_s) for option in options]


def test_modules_that_the_tape_watches_are_paid_once_and_only_if_something_of_them_runs_again() -> None:
    graph = chain(bytes_and_seconds=[(10, 1.0), (10, 2.0), (10, 4.0)])
    names = ["x", "a.v1", "a.v2", "b.v3"]
    values = tuple(replace(value, name=name) for value, name in zip(graph.values, names, strict=True))
    ops = tuple(replace(op, name=name) for op, name in zip(graph.ops, names[1:], strict=True))
    graph = UnitGraph(values, ops, tape_s=0.25, module_tape_s=(("a", 2.0), ("b", 64.0)))
    # Of the two values of "a" none is kept or both: watching it for one costs as much.
    assert points(unit_hull(graph)) == [(0, 73.25), (10, 5.25), (30, 0.0)]


def with_states(graph: UnitGraph, **state_bytes: int) -> UnitGraph:
    """The same unit, with ops that draw random numbers."""
    return replace(graph, ops=tuple(replace(op, state_bytes=state_bytes.get(op.name, 0)) for op in graph.ops))


def test_what_is_random_runs_again_only_with_the_state_of_its_generator_kept() -> None:
    graph = with_states(chain(bytes_and_seconds=[(100, 1.0), (10, 2.0)]), v1=16)
    assert points(unit_hull(graph)) == [(16, 3.0), (26, 1.0), (110, 0.0)]


def test_a_value_smaller_than_the_state_that_makes_it_again_is_kept() -> None:
    graph = with_states(chain(bytes_and_seconds=[(10, 1.0), (100, 2.0)]), v1=5000)
    assert points(unit_hull(graph)) == [(10, 2.0), (110, 0.0)]


@pytest.mark.parametrize("seed", range(40))
def test_values_that_ranks_may_hold_as_parts(seed: int) -> None:
    graph = divided(random_graph(random.Random(seed), num_values=7), random.Random(seed))
    graph = replace(graph, values=tuple(replace(value, is_output=False) for value in graph.values))
    options = unit_hull(graph)
    expected = all_points(graph, "keep")
    assert {(o.kept_bytes, round(o.recompute_s, 9)) for o in options} <= {(b, round(s, 9)) for b, s in expected}
    for price in (0.0, *(10.0**power for power in range(-4, 3))):
        best_s = min(price * nbytes + seconds for nbytes, seconds in expected)
        found_s = min(price * option.kept_bytes + option.recompute_s for option in options)
        assert found_s == pytest.approx(best_s, rel=1e-6)
    for option in options:
        assert option == Evaluator(graph).option(*option.stored)


def test_an_output_may_be_kept_as_a_part() -> None:
    values = (ValueRecord("x", 8, producer=None), ValueRecord("y", 100, producer=0, is_output=True))
    graph = UnitGraph(values, (OpRecord("y", (0,), (1,), 9.0),), parts=(PartRecord(1, 50, 1.0),))
    assert points(unit_hull(graph)) == [(50, 1.0), (100, 0.0)]
