"""The frontier: ordered, undominated, with its ends and the classics where they belong."""

from __future__ import annotations

import itertools

import pytest

from recollect.planning.classic import classic_plan
from recollect.planning.decisions import decide
from recollect.planning.frontier import Frontier, frontier
from toy_profile import simulate, stack


@pytest.fixture(scope="module")
def found() -> Frontier:
    return frontier(stack(16), simulate=simulate)


def test_peaks_rise_and_slowdowns_fall(found: Frontier) -> None:
    assert 10 <= len(found.points) <= 45
    for lean, fat in itertools.pairwise(found.points):
        assert lean.peak_bytes < fat.peak_bytes
        assert lean.slowdown > fat.slowdown


def test_points_are_what_their_plans_do(found: Frontier) -> None:
    profile = stack(16)
    for point in (*found.points, *found.classics):
        simulation = simulate(profile, decide(profile, point.plan))
        assert point.peak_bytes == simulation.peak_bytes
        assert point.slowdown == pytest.approx(simulation.recompute_s / profile.step_s)


def test_last_point_keeps_everything(found: Frontier) -> None:
    assert found.points[-1].slowdown == 0
    assert found.points[-1].peak_bytes == classic_plan(stack(16), "keep_all", simulate=simulate).predicted_peak_bytes


def test_no_classic_beats_the_frontier(found: Frontier) -> None:
    names = [point.name for point in found.classics]
    assert names == ["keep_all", "full", "sqrt, every 4", "every 2", "every 4", "every 8"]
    for classic in found.classics:
        best = found.best_within(classic.peak_bytes)
        assert best is not None, classic.name
        assert best.slowdown <= classic.slowdown, classic.name


def test_best_within_a_budget(found: Frontier) -> None:
    assert found.best_within(found.points[0].peak_bytes - 1) is None
    assert found.best_within(found.points[3].peak_bytes) is found.points[3]
    assert found.best_within(10**12) is found.points[-1]


def test_table() -> None:
    lines = str(frontier(stack(3), simulate=simulate)).splitlines()
    assert lines[0] == "      peak  slowdown  plan"
    assert lines[-1] == "   3.9 KiB     0.0 %  keep_all"
    assert all(len(line) <= 100 for line in lines)
