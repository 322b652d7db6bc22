"""The frontier: ordered, undominated, with its ends and the classics where they belong."""

import itertools
import math
from dataclasses import replace

import pytest

import recollect
from recollect.errors import PlanError, ProfileFormatError
from recollect.planning.bound import LowerBound
from recollect.planning.frontier import Frontier, frontier
from recollect.profile.events import StepLog
from recollect.profile.profile import Profile
from recollect.simulation.decisions import decide
from recollect.simulation.simulate import simulate
from small_llama import SMALL, batch_of, llama
from synthetic_step import with_log
from toy_profile import stack


@pytest.fixture(scope="module")
def found() -> Frontier:
    return frontier(stack(16))


def test_peaks_rise_and_slowdowns_fall(found: Frontier) -> None:
    assert 10 <= len(found.points) <= 45
    for lean, fat in itertools.pairwise(found.points):
        assert lean.peak_bytes < fat.peak_bytes
        assert lean.slowdown > fat.slowdown


def test_no_classic_beats_the_frontier(found: Frontier) -> None:
    names = [point.name for point in found.classics]
    assert names == ["keep_all", "full", "sqrt, every 4", "every 2", "every 8"]
    for classic in found.classics:
        best = found.best_within(classic.peak_bytes)
        assert best is not None, classic.name
        assert best.slowdown <= classic.slowdown, classic.name


def test_best_within_a_budget(found: Frontier) -> None:
    assert found.best_within(found.points[0].peak_bytes - 1) is None
    assert found.best_within(found.points[3].peak_bytes) is found.points[3]
    assert found.best_within(10**12) is found.points[-1]


def test_table() -> None:
    lines = str(frontier(stack(3))).splitlines()
    assert lines[0] == "      peak  slowdown  no plan below  plan"
    assert lines[-1] == "   4.2 KiB     0.0 %          0.0 %  keep all"
    assert all(len(line) <= 100 for line in lines)


@pytest.fixture(scope="module")
def recorded() -> Profile:
    return recollect.record(llama(), batch_of(SMALL), fake=True)


@pytest.fixture(scope="module")
def of_recorded(recorded: Profile) -> Frontier:
    return recollect.frontier(recorded)


def test_recorded_step_from_the_least_peak_to_the_plain_one(recorded: Profile, of_recorded: Frontier) -> None:
    found = of_recorded
    assert found.points[-1].slowdown == 0
    assert found.points[-1].peak_bytes <= found.plain_peak_bytes
    for point in (*found.points, *found.classics):
        simulation = simulate(recorded, decide(recorded, point.plan))
        assert (point.peak_bytes, point.plan.budget_bytes) == (simulation.peak_bytes, simulation.peak_bytes)
        assert point.slowdown == pytest.approx(simulation.recompute_s / recorded.step_s)
    with pytest.raises(recollect.errors.BudgetTooSmallError) as caught:
        recollect.plan(recorded, 1)
    assert found.points[0].peak_bytes <= caught.value.least_peak_bytes


def test_bound_is_below_every_plan_and_ends_where_no_plan_can_be(recorded: Profile, of_recorded: Frontier) -> None:
    found, bound = of_recorded, LowerBound(recorded)
    for point in (*found.points, *found.classics):
        assert point.bound_slowdown is not None
        assert point.bound_slowdown == point.plan.bound_slowdown
        # Both are solved to a tolerance of 1e-6.
        assert point.bound_slowdown <= min(point.slowdown, bound.added_s(point.peak_bytes) / recorded.step_s + 1e-6)
    budgets = [point.budget_bytes for point in found.bound]
    assert budgets == sorted(budgets)
    assert {point.peak_bytes for point in found.points} <= set(budgets)
    assert found.bound[0].budget_bytes < found.points[0].peak_bytes
    assert all(math.isfinite(point.slowdown) for point in found.bound[1:])
    for lean, fat in itertools.pairwise(found.bound):
        assert lean.slowdown >= fat.slowdown


def test_nothing_to_recompute_is_one_point() -> None:
    alone = Profile(graphs=(), calls=(), log=StepLog(), step_s=1.0, persistent={"parameters": 100})
    found = recollect.frontier(alone)
    assert [(point.peak_bytes, point.slowdown) for point in found.points] == [(100, 0.0)]
    assert str(found.points[0].plan).splitlines()[0] == "all units  keep all"


def test_no_bytes_to_save_is_one_point() -> None:
    """Backward asks for nothing: there is nothing to drop."""
    plain = stack(2, chained=False)
    graphs = tuple(replace(g, values=tuple(replace(v, saved=False) for v in g.values)) for g in plain.graphs)
    found = frontier(with_log(replace(plain, graphs=graphs)))
    assert len(found.points) == 1
    assert found.points[0].slowdown == 0
    assert found.points[0].peak_bytes == found.plain_peak_bytes


def test_empty_frontier_is_an_error() -> None:
    with pytest.raises(PlanError, match="got no points, expected at least one plan"):
        Frontier(points=())


def test_profile_without_events_is_an_error() -> None:
    with pytest.raises(ProfileFormatError, match="plan for Profile.Toy .*: got no memory events, expected"):
        frontier(replace(stack(2), log=StepLog()))
