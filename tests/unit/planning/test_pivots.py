"""Plans of two kinds, by whether a value is kept or its op runs again: the bound with them is higher, and never too high."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

import synthetic_step
from recollect.planning import bound as bound_module
from recollect.planning.bound import LowerBound
from recollect.planning.pivots import Pivot, pivots
from recollect.profile.events import SAVE, USE, WORK
from recollect.profile.graph import OpRecord, UnitGraph, ValueRecord
from recollect.profile.profile import Profile
from recollect.simulation.simulate import CallDecision, simulate
from synthetic_step import random_step

TOLERANCE_S = 1e-9


def working_at_pivots(profile: Profile, nbytes: int) -> Profile:
    """The step with working memory where backward asks for pivots, so that these are what binds."""
    pivot = pivots(profile)[0].value
    (log,) = profile.log.blocks
    handles = {event[3] for event in log if event[0] == SAVE and event[2] == pivot}
    events = []
    for event in log:
        events.append(event)
        if event[0] == USE and event[1] in handles:
            events.append((WORK, nbytes))
    return replace(profile, log=replace(profile.log, blocks=(tuple(events),)))


def all_points(profile: Profile) -> list[tuple[int, float]]:
    """Peak and recompute time of every plan."""
    graph = profile.graphs[0]
    droppable = [i for i, v in enumerate(graph.values) if v.producer is not None and not v.must_keep]
    choices = [
        CallDecision(frozenset(dropped), keep_output=keep_output)
        for size in range(len(droppable) + 1)
        for dropped in itertools.combinations(droppable, size)
        for keep_output in (True, False)
        if keep_output or len(graph.values) - 1 in dropped
    ]
    plans = itertools.product(choices, repeat=len(profile.calls))
    return list({(s.peak_bytes, s.recompute_s) for s in (simulate(profile, plan) for plan in plans)})


def without_pivots(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> LowerBound:
    with monkeypatch.context() as patch:
        patch.setattr(bound_module, "pivots", lambda _: {})
        return LowerBound(profile)


def check(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> int:
    """Compare the bound with all plans, and with the bound without pivots; return how often it is higher than that."""
    points = all_points(profile)
    bound, plain = LowerBound(profile), without_pivots(profile, monkeypatch)
    num_raised = 0
    for budget in {peak for peak, _ in points}:
        best_s = min(recompute_s for peak, recompute_s in points if peak <= budget)
        found_s, plain_s = bound.recompute_s(budget), plain.recompute_s(budget)
        # The bound is lowered by a millionth, for what floating point loses.
        assert plain_s * (1 - 1e-5) - TOLERANCE_S <= found_s <= best_s + TOLERANCE_S
        num_raised += found_s > plain_s * (1 + 1e-3)
    return num_raised


@pytest.mark.parametrize("seed", range(20))
def test_bound_is_never_above_the_best_of_all_plans(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    num_units = 1 + seed % 2
    profile = random_step(seed, num_values=(6, 4)[num_units - 1], num_units=num_units, saved_part=0.9)
    for nbytes in (0, 150, 400) if pivots(profile) else ():
        check(working_at_pivots(profile, nbytes), monkeypatch)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("nbytes", [64, 200])
def test_of_masked_products_either_the_result_is_kept_or_the_factors_are_there(
    seed: int, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in attention: two large factors and their product, all saved, and memory is full where the product is used."""
    values = (
        ValueRecord("input", 8, None),
        ValueRecord("softmax", nbytes, 0, saved=True),
        ValueRecord("mask", nbytes, 1, saved=True),
        ValueRecord("product", nbytes, 2, saved=True),
        ValueRecord("output", 8, 3, is_output=True),
    )
    ops = (
        OpRecord("softmax", (0,), (1,), 5.0),
        OpRecord("mask", (0,), (2,), 5.0),
        OpRecord("product", (1, 2), (3,), 1.0),
        OpRecord("output", (3,), (4,), 1.0),
    )
    made = UnitGraph(values, ops), [[], [], [1, 2], [3]]
    with monkeypatch.context() as patch:
        patch.setattr(synthetic_step, "random_unit", lambda *_, **__: made)
        step = random_step(seed, num_values=4, num_units=2)
    assert pivots(step) == {0: Pivot(3, frozenset({1, 2}))}
    assert check(working_at_pivots(step, 4 * nbytes), monkeypatch) >= 2


def test_what_is_no_pivot() -> None:
    x = ValueRecord("x", 8, None)
    a = ValueRecord("a", 64, 0, saved=True)
    b = ValueRecord("b", 64, 1, saved=True)
    ops = (OpRecord("a", (0,), (1,), 1.0), OpRecord("b", (1,), (2,), 1.0))
    step = random_step(0, num_values=4)

    def found(first: ValueRecord, second: ValueRecord, op: OpRecord = ops[1]) -> dict[int, Pivot]:
        return pivots(replace(step, graphs=(UnitGraph((x, first, second), (ops[0], op)),)))

    assert found(a, b) == {0: Pivot(2, frozenset({1}))}
    assert not found(a, replace(b, is_output=True))
    assert not found(a, replace(b, saved=False))
    assert not found(a, replace(b, must_keep=True))
    assert not found(a, replace(b, mutated_later=True))
    assert not found(replace(a, saved=False), b)
    assert not found(replace(a, mutated_later=True), b)
    assert not found(a, b, replace(ops[1], mutates=True))
