"""The contract of the solver: candidates close to the bound, always the same, in any order; see also `test_optimality.py`."""

from typing import Any

import numpy as np
import pytest

from recollect.planning import fill
from recollect.planning.bound import LowerBound
from recollect.planning.chain_solver import ChainSolver
from recollect.planning.hull import Evaluator, Option
from recollect.planning.mix import Limits, Mix, Stage
from recollect.profile.profile import Profile
from recollect.simulation.decisions import CallActions
from recollect.simulation.peak_sums import PeakSums
from recollect.simulation.simulate import simulate
from synthetic_step import random_step


@pytest.fixture(scope="module", params=[2, 7, 19])
def profile(request: pytest.FixtureRequest) -> Profile:
    return random_step(request.param, num_values=10, num_units=5)


def plain_bytes(profile: Profile) -> int:
    return simulate(profile, [CallActions()] * len(profile.calls)).peak_bytes


def test_candidates_of_larger_steps_are_close_to_the_bound(profile: Profile) -> None:
    """Measured: up to 0.5 % of the step above it, so no value more would fit and save more."""
    solved, bound = ChainSolver(profile), LowerBound(profile)
    for percent in (95, 85, 70):
        budget_bytes = plain_bytes(profile) * percent // 100
        found = solved.best(budget_bytes, 0.0)
        assert found is not None and found.peak_bytes <= budget_bytes
        assert found.recompute_s - bound.added_s(budget_bytes) <= 0.006 * profile.step_s, percent


def test_two_solvers_say_the_same(profile: Profile) -> None:
    budget_bytes = plain_bytes(profile) * 85 // 100
    first, second = ChainSolver(profile).best(budget_bytes, 0.0), ChainSolver(profile).best(budget_bytes, 0.0)
    assert first is not None
    assert second is not None
    assert (first.choice, first.cost) == (second.choice, second.cost)


def test_a_known_candidate_is_not_taken_for_a_byte_less_than_its_peak(profile: Profile) -> None:
    solved = ChainSolver(profile)
    found = solved.best(plain_bytes(profile) * 85 // 100, 0.0)
    assert found is not None
    leaner = solved.best(found.peak_bytes - 1, 0.0)
    assert leaner is None or leaner.peak_bytes < found.peak_bytes


def test_seconds_below_zero_end_the_search_of_a_mix() -> None:
    """Measured times of compiled units make some options faster than PyTorch's choice, which counts as 0 seconds."""
    unit = Stage(np.array([100, 60, 10]), np.array([-2e-6, -1.5e-6, -1e-6]), own_bytes=np.zeros(3, dtype=np.int64))
    limits = Limits(np.arange(2), np.ones((2, 2)), [np.zeros(3, dtype=np.int64)] * 2)
    found = {budget_bytes: Mix([unit, unit], limits, budget_bytes).chosen() for budget_bytes in (200, 165, 119, 19)}
    assert {budget_bytes: one and sorted(one) for budget_bytes, one in found.items()} == {
        200: [0, 0],
        165: [0, 1],
        119: [0, 2],
        19: None,
    }


def test_of_large_units_few_values_are_tried_where_a_plan_leaves_room(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = random_step(2, num_values=40, num_units=3)
    budget_bytes, start = plain_bytes(profile), ChainSolver(profile).leanest
    num_tried, option = [0], Evaluator.option

    def counted(self: Evaluator, *stored: Any) -> Option:
        num_tried[0] += 1
        return option(self, *stored)

    monkeypatch.setattr(Evaluator, "option", counted)
    found = {}
    for fewest in (1000, 2):
        monkeypatch.setattr(fill, "_FEWEST_VALUES", fewest)
        monkeypatch.setattr(fill, "_OPS_OF_ALL_VALUES", 1)
        num_tried[0] = 0
        _, cost = fill.Filling(PeakSums.of(profile)).filled(start, budget_bytes)
        assert cost.peak_bytes <= budget_bytes and cost.recompute_s < start.recompute_s
        found[fewest] = num_tried[0]
    assert found[2] < found[1000]
