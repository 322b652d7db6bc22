"""Options of a unit against their definition, written out: the hull, one value more or less, and none that another beats."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterable
from dataclasses import replace

import pytest

from recollect.planning.chain_solver import unit_options
from recollect.planning.hull import Evaluator, Option, unit_hull
from recollect.plans.value_names import module_of
from recollect.profile.graph import OpRecord, UnitGraph, ValueRecord
from synthetic_step import random_step
from watched_modules import on_modules

Keep = frozenset[int]
ALL = 10**6


def unit(seed: int, *, num_values: int = 9) -> UnitGraph:
    """A random unit, some of whose values are written to later: they cannot be kept unless autograd itself saved them."""
    rng = random.Random(seed)
    graph = random_step(seed, num_values=num_values).graphs[0]
    values = [
        replace(value, mutated_later=value.producer is not None and not value.is_output and rng.random() < 0.2)
        for value in graph.values
    ]
    return UnitGraph(tuple(values), graph.ops)


def produced(graph: UnitGraph) -> list[int]:
    return [index for index, value in enumerate(graph.values) if value.producer is not None]


def can_be_kept(graph: UnitGraph, option: Option) -> bool:
    return all(graph.values[index].saved or not graph.values[index].mutated_later for index in option.stored.whole)


def cost(graph: UnitGraph, option: Option) -> tuple[int, float, int]:
    made_again = [index for op in option.recompute_ops for index in graph.ops[op].outputs]
    return option.kept_bytes, option.recompute_s, sum(graph.values[index].nbytes for index in made_again)


def unbeaten(graph: UnitGraph) -> set[tuple[int, float, int]]:
    """Costs of the options of both hulls and of their neighbours, without those that another one beats."""
    hull = unit_hull(graph)
    free = unit_hull(replace(graph, tape_s=0.0, module_tape_s=()))
    corners = [*hull, *(Evaluator(graph).option(*option.stored) for option in free)]
    of_use = {i for option in corners for i in option.stored.values} | {
        i for i in produced(graph) if graph.values[i].saved
    }
    neighbours = [Evaluator(graph).option(*option.stored.toggled(index)) for option in corners for index in of_use]
    for option in corners:
        for module in {module_of(graph.ops[op].name) for op in option.recompute_ops}:
            ops = [op for op in option.recompute_ops if module_of(graph.ops[op].name) == module]
            neighbours.append(
                Evaluator(graph).option(
                    *option.stored.with_whole(index for op in ops for index in graph.ops[op].outputs)
                )
            )
    neighbours += corners
    costs = {cost(graph, option) for option in (*hull, *neighbours) if option in hull or can_be_kept(graph, option)}
    return {c for c in costs if not any(o != c and all(a <= b for a, b in zip(o, c, strict=True)) for o in costs)}


@pytest.mark.parametrize("seed", range(90))
def test_options_are_what_no_other_neighbour_of_the_hull_beats(seed: int) -> None:
    graph = unit(seed) if seed < 60 else on_modules(unit(seed), random.Random(seed))
    options, hull = unit_options(graph, most_options=ALL), unit_hull(graph)
    assert {cost(graph, option) for option in options} == unbeaten(graph)
    assert len({option.stored for option in options}) == len(options)
    # Options that cost the same are there once; of a hull that ends with one that is as fast as a leaner one, only that.
    assert len(options) == len(unbeaten(graph))
    assert {cost(graph, option) for option in hull} & unbeaten(graph) <= {cost(graph, option) for option in options}
    assert [cost(graph, option) for option in options] == sorted(cost(graph, option) for option in options)


def test_some_units_have_what_the_hull_has_not() -> None:
    counts = [(len(unit_options(unit(seed), most_options=ALL)), len(unit_hull(unit(seed)))) for seed in range(60)]
    assert sum(options > hull for options, hull in counts) > 20


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("most_options", [1, 6, 9, 14])
def test_long_lists_are_thinned_evenly(seed: int, most_options: int) -> None:
    graph = unit(seed, num_values=16)
    everything, thinned = unit_options(graph, most_options=ALL), unit_options(graph, most_options=most_options)
    hull = {option.stored for option in unit_hull(graph)}
    others = [option for option in everything if option.stored not in hull]
    room = max(0, most_options - (len(everything) - len(others)))
    left = [option for option in thinned if option.stored not in hull]
    assert [option for option in thinned if option.stored in hull] == [o for o in everything if o.stored in hull]
    assert len(left) == min(len(others), room)
    assert [option for option in everything if option in thinned] == list(thinned)
    if left:
        assert left[0] == others[0]
        places = [others.index(option) for option in left]
        gaps = [later - earlier for earlier, later in itertools.pairwise([*places, len(others)])]
        assert max(gaps) - min(gaps) <= 1


def long_chain(num_values: int) -> UnitGraph:
    """Values in a row, all saved, with sizes and times that make every subset of them different."""
    values = [ValueRecord("input", 8, producer=None)]
    values += [ValueRecord(f"v{i}", 3**i % 1009, producer=i, saved=True) for i in range(num_values)]
    ops = tuple(OpRecord(f"v{i}", (i,), (i + 1,), float(5**i % 997)) for i in range(num_values))
    return UnitGraph(tuple(values), ops)


def test_default_length() -> None:
    graph = long_chain(40)
    assert len(unit_options(graph, most_options=ALL)) > 64
    assert len(unit_options(graph)) == max(64, len(unit_hull(graph)))


def test_the_work_for_a_large_unit_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all sizes and times different, every value of hundreds of hull options could be varied."""
    rng = random.Random(0)
    values, ops = [ValueRecord("input", 8, producer=None)], []
    for index in range(600):
        inputs = tuple(sorted({max(0, index - int(rng.expovariate(0.3))) for _ in range(2)}))
        values.append(ValueRecord(f"op{index}", rng.randrange(1, 10_000), producer=index, saved=rng.random() < 0.6))
        ops.append(OpRecord(f"op{index}", inputs, (index + 1,), rng.random()))
    graph = UnitGraph(tuple(values), tuple(ops))
    num_evaluated = 0
    evaluated = Evaluator.option

    def counted(self: Evaluator, whole: Iterable[int], parts: Collection[int] = ()) -> Option:
        nonlocal num_evaluated
        num_evaluated += 1
        assert num_evaluated < 3000
        return evaluated(self, whole, parts)

    monkeypatch.setattr(Evaluator, "option", counted)
    options = unit_options(graph)
    assert len(options) >= 64
    assert [option.kept_bytes for option in options] == sorted(option.kept_bytes for option in options)
