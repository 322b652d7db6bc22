"""The planner against brute force, through the real simulator: plans are optimal, bounds are bounds, budgets hold."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Iterator
from dataclasses import replace

import pytest

from recollect.errors import BudgetTooSmallError
from recollect.planning.bound import LowerBound
from recollect.planning.choose import Planner
from recollect.planning.choose import plan as choose
from recollect.profile.graph import UnitGraph
from recollect.profile.profile import Profile
from recollect.simulation.decisions import decide
from recollect.simulation.simulate import CallDecision, simulate
from synthetic_step import random_step
from watched_modules import on_modules

TOLERANCE_S = 1e-6
Point = tuple[int, float]


def choices(graph: UnitGraph) -> Iterator[CallDecision]:
    """Everything that a plan can say of a unit."""
    droppable = [i for i, v in enumerate(graph.values) if v.producer is not None and not v.must_keep]
    output = len(graph.values) - 1
    for size in range(len(droppable) + 1):
        for dropped in itertools.combinations(droppable, size):
            yield CallDecision(frozenset(dropped))
            if output in dropped:
                yield CallDecision(frozenset(dropped), keep_output=False)


def all_plans(profile: Profile) -> list[Point]:
    """Peak and recompute time of every plan."""
    units = [list(choices(profile.graph_of(call))) for call in profile.calls]
    simulations = (simulate(profile, decisions) for decisions in itertools.product(*units))
    return list({(s.peak_bytes, s.recompute_s) for s in simulations})


def budgets(points: list[Point]) -> list[int]:
    """From the least possible peak to just below that of keeping everything."""
    least = min(peak for peak, _ in points)
    most = min(peak for peak, recompute_s in points if recompute_s == 0)
    return sorted({least + (most - least) * step // 4 for step in range(4)})


def gap_s(profile: Profile, planner: Planner, points: list[Point], budget: int) -> float:
    """Seconds that the plan takes longer than the best one; checks on the way that it is what it says."""
    best_s = min(recompute_s for peak, recompute_s in points if peak <= budget)
    try:
        made = planner.plan(budget)
    except BudgetTooSmallError:
        return math.inf
    simulation = simulate(profile, decide(profile, made))
    assert simulation.peak_bytes == made.predicted_peak_bytes <= budget
    assert made.bound_slowdown is not None
    assert made.bound_slowdown * profile.step_s <= best_s + TOLERANCE_S
    assert simulation.recompute_s >= best_s - TOLERANCE_S
    return simulation.recompute_s - best_s


@pytest.mark.parametrize("seed", range(250))
def test_plan_of_one_unit_is_the_best_of_all_plans(seed: int) -> None:
    profile = random_step(seed, num_values=4 + seed % 4)
    points = all_plans(profile)
    planner = Planner(profile)
    for budget in budgets(points):
        assert gap_s(profile, planner, points, budget) <= TOLERANCE_S


@pytest.mark.parametrize(("seed", "num_values"), [(seed, 9) for seed in range(6)] + [(1000, 12), (1001, 12)])
def test_plan_of_a_larger_unit_is_the_best_of_all_plans(seed: int, num_values: int) -> None:
    profile = random_step(seed, num_values=num_values)
    points = all_plans(profile)
    planner = Planner(profile)
    for budget in budgets(points):
        assert gap_s(profile, planner, points, budget) <= TOLERANCE_S


@pytest.mark.parametrize("num_units", [2, 3])
@pytest.mark.parametrize("seed", range(60))
def test_plans_of_chains_are_the_best_of_all_plans(seed: int, num_units: int) -> None:
    """Over everything that a plan can say, not only over options that the planner knows."""
    profile = random_step(seed, num_values=6 - num_units, num_units=num_units)
    points = all_plans(profile)
    planner = Planner(profile)
    for budget in budgets(points):
        assert gap_s(profile, planner, points, budget) <= TOLERANCE_S


def on_a_slow_tape(profile: Profile, seed: int) -> Profile:
    """The same step, where a unit that recomputes anything pays for the tape too, or for each module that it watches."""
    ops_s = max(op.time_s for graph in profile.graphs for op in graph.ops)
    if seed % 2:
        rng = random.Random(seed)
        return replace(profile, graphs=tuple(on_modules(graph, rng, most_s=ops_s) for graph in profile.graphs))
    graphs = tuple(replace(g, tape_s=ops_s * (0.5, 1.0, 4.0)[(seed + i) % 3]) for i, g in enumerate(profile.graphs))
    return replace(profile, graphs=graphs)


@pytest.mark.parametrize("num_units", [1, 2, 3])
def test_plans_and_bounds_with_the_tape_s_own_time(num_units: int) -> None:
    missed, num_budgets = [], 0
    for seed in range(40):
        profile = on_a_slow_tape(random_step(seed, num_values=(7, 4, 3)[num_units - 1], num_units=num_units), seed)
        points = all_plans(profile)
        planner = Planner(profile)
        for budget in budgets(points):
            num_budgets += 1
            if gap_s(profile, planner, points, budget) > TOLERANCE_S:  # also checks the bound
                missed.append((seed, budget))
    assert len(missed) <= (0, 0.02, 0.02)[num_units - 1] * num_budgets, missed


@pytest.mark.parametrize("seed", range(120))
def test_bound_is_never_above_the_best_of_all_plans(seed: int) -> None:
    num_units = 1 + seed % 3
    profile = random_step(5000 + seed, num_values=(7, 4, 3)[num_units - 1], num_units=num_units, state_bytes=8)
    points = all_plans(profile)
    bound = LowerBound(profile)
    for budget in budgets(points):
        best_s = min(recompute_s for peak, recompute_s in points if peak <= budget)
        assert bound.recompute_s(budget) <= best_s + TOLERANCE_S
    least = min(peak for peak, _ in points)
    assert bound.recompute_s(least) < math.inf


def test_bound_says_something() -> None:
    """A bound of zero would pass the test above."""
    shares = []
    for seed in range(60):
        profile = random_step(seed, num_values=7)
        points = all_plans(profile)
        bound = LowerBound(profile)
        for budget in budgets(points):
            best_s = min(recompute_s for peak, recompute_s in points if peak <= budget)
            if best_s > 0:
                shares.append(bound.recompute_s(budget) / best_s)
    assert statistics.median(shares) > 0.5


def test_bound_is_infinite_where_every_plan_has_more() -> None:
    profile = random_step(0, num_values=5)
    assert LowerBound(profile).recompute_s(profile.persistent_bytes) == math.inf


def test_bound_falls_with_the_budget() -> None:
    profile = random_step(7, num_values=7, num_units=3)
    bound = LowerBound(profile)
    most = simulate(profile, [CallDecision(frozenset())] * 3).peak_bytes
    values = [bound.recompute_s(budget) for budget in (*range(most // 2, most, 10), most)]
    assert all(later <= earlier for earlier, later in itertools.pairwise(values))
    assert values[-1] == 0


@pytest.mark.parametrize("seed", range(3))
def test_budgets_hold_and_bounds_are_close_for_long_chains(seed: int) -> None:
    profile = random_step(seed, num_values=10, num_units=12)
    planner = Planner(profile)
    most = simulate(profile, [CallDecision(frozenset())] * 12).peak_bytes
    gaps = []
    for percent in range(60, 100, 4):
        try:
            made = planner.plan(most * percent // 100)
        except BudgetTooSmallError:
            continue
        peak_bytes = simulate(profile, decide(profile, made)).peak_bytes
        assert peak_bytes == made.predicted_peak_bytes <= most * percent // 100
        gaps.append((made.predicted_slowdown or 0.0) - (made.bound_slowdown or 0.0))
    assert statistics.median(gaps) <= 0.02


def test_least_peak_of_the_error_can_be_planned() -> None:
    for seed in range(20):
        profile = random_step(seed, num_values=6, num_units=2)
        with pytest.raises(BudgetTooSmallError) as error:
            choose(profile, profile.persistent_bytes)
        made = choose(profile, error.value.least_peak_bytes)
        assert (made.predicted_peak_bytes or 0) <= error.value.least_peak_bytes


def test_a_planner_that_planned_before_is_not_worse() -> None:
    profile = random_step(3, num_values=8, num_units=4)
    most = simulate(profile, [CallDecision(frozenset())] * 4).peak_bytes
    planner = Planner(profile)
    for percent in (95, 90, 85, 80):
        budget = most * percent // 100
        again = planner.plan(budget).predicted_slowdown or 0.0
        assert again <= (choose(profile, budget).predicted_slowdown or 0.0) + TOLERANCE_S
