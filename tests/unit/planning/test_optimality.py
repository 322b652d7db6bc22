"""The planner and its bound against everything that a plan can say of a small step, and the bound of larger ones against a
linear program.
"""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from budgets import least_bytes
from every_plan import all_plans, in_parts, on_a_slow_tape
from recollect.errors import BudgetTooSmallError
from recollect.planning.bound import LowerBound
from recollect.planning.cheapest_step import CheapestStep
from recollect.planning.checkpoint_times import checkpoint_times
from recollect.planning.choose import Planner
from recollect.planning.planners import plan as choose
from recollect.profile.profile import Profile
from recollect.simulation.decisions import decide
from recollect.simulation.simulate import simulate
from step_program import StepProgram
from synthetic_step import random_step

TOLERANCE_S = 1e-6
# Numbers of units and of values, small enough to try all plans.
SIZES = ((1, 7), (2, 4), (3, 3))


def steps_of(seeds: Iterable[int], **settings: float) -> list[Profile]:
    made = []
    for seed in seeds:
        num_units, num_values = SIZES[seed % 3]
        made.append(random_step(seed, num_values=num_values, num_units=num_units, **settings))  # type: ignore[arg-type]
    return made


@dataclass(frozen=True)
class Expected:
    """What plans of some steps, for several budgets each, come to at least; measured, and a little less."""

    optimal: float
    """Part of the budgets for which no plan is faster."""
    gap: float
    """Seconds over the fastest of all plans, at most, as a part of the step."""
    num_missing: int
    """Budgets, at most, for which no plan is found where there is one."""
    tightness: float
    """The mean of the bound as a part of the fastest of all plans."""
    leanest: float
    """Part of the steps whose least peak is that of all plans."""


# On steps of a few values there is little to choose from: the planner is made for layers of hundreds.
STEPS: dict[str, tuple[list[Profile], Expected]] = {
    "one unit": ([random_step(s, num_values=4 + s % 4) for s in range(16)], Expected(0.89, 0.01, 5, 0.62, 0.9)),
    "chains": (
        [
            *(random_step(s, num_values=4, num_units=2) for s in range(6)),
            *(random_step(s, num_values=3, num_units=3) for s in range(3)),
        ],
        Expected(0.83, 0.07, 2, 0.75, 0.85),
    ),
    "random ops": (steps_of(range(5000, 5009), state_bytes=8), Expected(0.88, 0.03, 4, 0.67, 0.8)),
    "slow tape": (
        [
            on_a_slow_tape(random_step(s, num_values=num_values, num_units=num_units), s)
            for num_units, num_values in ((1, 6), (2, 4))
            for s in range(8)
        ],
        Expected(0.83, 0.15, 3, 0.525, 0.85),
    ),
    "written over": (steps_of(range(12), saved_part=0.8, writes=True), Expected(0.88, 0.01, 5, 0.64, 0.9)),
    "parts": (
        [in_parts(random_step(s, num_values=(5, 3)[s % 2], num_units=1 + s % 2, saved_part=0.8), s) for s in range(12)],
        Expected(0.95, 0.02, 0, 0.655, 1),
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_plans_are_mostly_the_best_of_all_and_none_is_below_the_bound(name: str) -> None:
    steps, expected = STEPS[name]
    gaps: list[float] = []
    shares: list[float] = []
    excess: list[float] = []
    num_missing = 0
    for profile in steps:
        points = all_plans(profile)
        planner, bound = Planner(profile), LowerBound(profile)
        least = min(peak for peak, _ in points)
        most = min(peak for peak, recompute_s in points if recompute_s == 0)
        fixed = int(checkpoint_times(profile).fixed_bytes.max())
        assert bound.added_s(least) < math.inf and bound.added_s(profile.persistent_bytes) == math.inf
        least_found = least_bytes(planner)
        assert (planner.plan(least_found).predicted_peak_bytes or 0) <= least_found
        excess.append(least_found / least - 1)
        for budget in sorted({fixed, (fixed + least) // 2, *(least + (most - least) * i // 4 for i in range(4))}):
            best_s = min((recompute_s for peak, recompute_s in points if peak <= budget), default=math.inf)
            assert bound.added_s(budget) <= best_s + TOLERANCE_S
            if 0 < best_s < math.inf:
                shares.append(bound.added_s(budget) / best_s)
            try:
                made = planner.plan(budget)
            except BudgetTooSmallError:
                num_missing += best_s < math.inf
                continue
            simulation = simulate(profile, decide(profile, made))
            assert simulation.peak_bytes == made.predicted_peak_bytes <= budget
            assert made.bound_slowdown is not None
            assert made.bound_slowdown * profile.step_s <= best_s + TOLERANCE_S
            assert simulation.recompute_s >= best_s - TOLERANCE_S
            gaps.append((simulation.recompute_s - best_s) / profile.step_s)
    found = Expected(
        optimal=sum(gap <= 1e-9 for gap in gaps) / (len(gaps) + num_missing),
        gap=max(gaps),
        num_missing=num_missing,
        tightness=statistics.mean(shares),
        leanest=sum(more == 0 for more in excess) / len(excess),
    )
    assert found.optimal >= expected.optimal
    assert found.gap <= expected.gap and max(excess) <= 0.1
    assert found.num_missing <= expected.num_missing
    assert found.tightness >= expected.tightness
    assert found.leanest >= expected.leanest


@pytest.mark.parametrize("kind", ["plain", "written over", "parts"])
@pytest.mark.parametrize("seed", range(6))
def test_the_bound_is_that_of_a_linear_program(seed: int, kind: str) -> None:
    """In any order of budgets, at the moments that the bound looks at or at all of them."""
    profile = random_step(seed, num_values=8, num_units=4, state_bytes=8, saved_part=0.8, writes=kind == "written over")
    profile = on_a_slow_tape(profile, seed // 2) if seed % 2 else profile
    profile = in_parts(profile, seed) if kind == "parts" else profile
    times = checkpoint_times(profile, range(len(profile.log.events)) if seed % 3 == 0 else None)
    bound = LowerBound(profile, steps=CheapestStep(profile, times), fixed_bytes=times.fixed_bytes)
    program = StepProgram(profile, times)
    least, most = int(times.fixed_bytes.max()), Planner(profile).plain_peak_bytes
    for part in (0.9, 0.0, 0.1, 0.3, 0.6):
        budget = round(least + part * (most - least))
        expected_s = program.least_s(budget)
        assert bound.added_s(budget) == pytest.approx(expected_s, rel=1e-5, abs=TOLERANCE_S)


def test_a_planner_that_planned_before_is_not_worse() -> None:
    profile = random_step(3, num_values=8, num_units=4)
    planner = Planner(profile)
    for percent in (95, 90, 85, 80):
        again = planner.plan(planner.plain_peak_bytes * percent // 100)
        alone = choose(profile, again.budget_bytes or 0)
        assert (again.predicted_slowdown or 0.0) <= (alone.predicted_slowdown or 0.0) + TOLERANCE_S
