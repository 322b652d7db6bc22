"""What users get from the planner, against brute force through the real simulator: gaps are counted, bounds are bounds."""

import math
import statistics
from collections.abc import Iterable
from typing import NamedTuple

import pytest

from every_plan import Point, all_plans, on_a_slow_tape
from recollect.errors import BudgetTooSmallError
from recollect.planning.bound import LowerBound
from recollect.planning.choose import Planner
from recollect.planning.planners import plan as choose
from recollect.profile.profile import Profile
from recollect.simulation.decisions import CallActions, decide
from recollect.simulation.simulate import simulate
from synthetic_step import random_step

TOLERANCE_S = 1e-6


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


class Gaps(NamedTuple):
    """Seconds over the best of all plans, as parts of the step; how many budgets; and for how many no plan was found."""

    gaps: list[float]
    num_missing: int

    @property
    def part_optimal(self) -> float:
        return sum(gap <= 1e-9 for gap in self.gaps) / (len(self.gaps) + self.num_missing)


def gaps_of(steps: Iterable[Profile]) -> Gaps:
    """Plan each step for four budgets, as users do, and compare with all plans that there are."""
    found: list[float] = []
    for profile in steps:
        points = all_plans(profile)
        planner = Planner(profile)
        found += [gap_s(profile, planner, points, budget) / profile.step_s for budget in budgets(points)]
    return Gaps([gap for gap in found if gap < math.inf], sum(gap == math.inf for gap in found))


def test_plans_of_one_unit_are_mostly_the_best_of_all_plans() -> None:
    """On steps of a few values there is little to choose from: the planner is made for layers of hundreds.

    Measured with 60 seeds, 205 budgets: 181 optimal (88 %), 7 without a plan where there is one, the worst gap 8.5 % of the
    step. Steps of this size used to be planned by enumeration, which no recorded model is small enough for.
    """
    found = gaps_of(random_step(seed, num_values=4 + seed % 4) for seed in range(16))
    assert found.part_optimal >= 0.8
    assert max(found.gaps) <= 0.1
    assert found.num_missing <= 4


def test_plans_of_chains_are_mostly_the_best_of_all_plans() -> None:
    """Over everything that a plan can say. Measured with 30 seeds: 100 of 111 budgets of two units are optimal, 4 have no plan
    where there is one, the worst gap is 7.9 %; three units of 3 values: all 114 are optimal.
    """
    steps = [random_step(seed, num_values=4, num_units=2) for seed in range(6)]
    found = gaps_of([*steps, *(random_step(seed, num_values=3, num_units=3) for seed in range(3))])
    assert found.part_optimal >= 0.8
    assert max(found.gaps) <= 0.1
    assert found.num_missing <= 2


def test_plans_and_bounds_with_the_tape_s_own_time() -> None:
    for num_units, num_values in ((1, 6), (2, 4)):
        steps = (on_a_slow_tape(random_step(s, num_values=num_values, num_units=num_units), s) for s in range(8))
        found = gaps_of(steps)  # also checks the bound
        assert found.part_optimal >= 0.7


def test_bound_is_never_above_the_best_of_all_plans() -> None:
    for seed in range(12):
        num_units = 1 + seed % 3
        profile = random_step(5000 + seed, num_values=(7, 4, 3)[num_units - 1], num_units=num_units, state_bytes=8)
        points = all_plans(profile)
        bound = LowerBound(profile)
        for budget in budgets(points):
            best_s = min(recompute_s for peak, recompute_s in points if peak <= budget)
            assert bound.added_s(budget) <= best_s + TOLERANCE_S, seed
        least = min(peak for peak, _ in points)
        assert bound.added_s(least) < math.inf, seed


def test_bound_says_something() -> None:
    shares = []
    for seed in range(20):
        profile = random_step(seed, num_values=6)
        points = all_plans(profile)
        bound = LowerBound(profile)
        for budget in budgets(points):
            best_s = min(recompute_s for peak, recompute_s in points if peak <= budget)
            if best_s > 0:
                shares.append(bound.added_s(budget) / best_s)
    assert statistics.median(shares) > 0.5


def test_bound_is_infinite_where_every_plan_has_more() -> None:
    profile = random_step(0, num_values=5)
    assert LowerBound(profile).added_s(profile.persistent_bytes) == math.inf


def test_least_peak_of_the_error_can_be_planned() -> None:
    for seed in range(5):
        profile = random_step(seed, num_values=6, num_units=2)
        with pytest.raises(BudgetTooSmallError) as error:
            choose(profile, profile.persistent_bytes)
        made = choose(profile, error.value.least_peak_bytes)
        assert (made.predicted_peak_bytes or 0) <= error.value.least_peak_bytes


def test_a_planner_that_planned_before_is_not_worse() -> None:
    profile = random_step(3, num_values=8, num_units=4)
    most = simulate(profile, [CallActions()] * 4).peak_bytes
    planner = Planner(profile)
    for percent in (95, 90, 85, 80):
        budget = most * percent // 100
        again = planner.plan(budget).predicted_slowdown or 0.0
        assert again <= (choose(profile, budget).predicted_slowdown or 0.0) + TOLERANCE_S
