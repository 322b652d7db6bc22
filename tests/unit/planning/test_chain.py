"""The parts that the planner is made of: windows, menus, the chain's model of peaks."""

from __future__ import annotations

import itertools
import random

import pytest

from recollect.planning.chain import Chain
from recollect.planning.chain_solver import unit_options
from recollect.planning.hull import Evaluator, unit_hull
from recollect.planning.option_table import Candidate, Choice, KnownCosts, OptionTable
from recollect.planning.output_choices import single_outputs
from recollect.profile.events import BACKWARD, FORWARD, OPTIMIZER
from recollect.profile.profile import Profile
from recollect.simulation.decisions import CallActions, ValueActions
from recollect.simulation.peak_sums import PeakSums
from recollect.simulation.simulate import simulate
from recollect.simulation.windows import windows
from synthetic_step import random_step


class SeenCosts(KnownCosts):
    """Remembers the choices that were played."""

    def __init__(self, profile: Profile) -> None:
        table = OptionTable(profile, options_of=unit_options)
        super().__init__(PeakSums.of(profile), table)
        self.seen: list[Choice] = []

    def candidate(self, choice: Choice) -> Candidate:
        self.seen.append(choice)
        return super().candidate(choice)


def chain_of(profile: Profile) -> tuple[OptionTable, Chain, list[Choice]]:
    costs = SeenCosts(profile)
    return costs.table, Chain(costs, most_probes=64), costs.seen


def test_windows_are_forward_in_order_and_backward_in_reverse() -> None:
    found = windows(random_step(1, num_values=8, num_units=4))
    forward = [window.call for window in found if window.phase == FORWARD]
    backward = [window.call for window in found if window.phase == BACKWARD]
    assert forward == [0, 1, 2, 3]
    assert backward == sorted(backward, reverse=True)
    assert found[-1].phase == OPTIMIZER
    assert all(earlier.start < later.start for earlier, later in itertools.pairwise(found))


@pytest.mark.parametrize("seed", range(10))
def test_peaks_of_windows_add_up_to_the_peaks_of_the_step(seed: int) -> None:
    profile = random_step(seed, num_values=8, num_units=3)
    found = windows(profile)
    rng = random.Random(seed)
    graph = profile.graphs[0]
    droppable = [i for i, v in enumerate(graph.values) if v.producer is not None and not v.must_keep]
    decisions = [
        CallActions(ValueActions.recomputing(i for i in droppable if rng.random() < 0.5)) for _ in profile.calls
    ]
    plain, split = simulate(profile, decisions), simulate(profile, decisions, windows=found)
    assert len(split.window_peaks) == len(found)
    assert max(split.window_peaks) == split.peak_bytes == plain.peak_bytes
    for phase, peak_bytes in ((FORWARD, plain.forward_peak_bytes), (BACKWARD, plain.backward_peak_bytes)):
        peaks = [peak for window, peak in zip(found, split.window_peaks, strict=True) if window.phase == phase]
        assert max(peaks) == peak_bytes
    assert plain.window_peaks == ()


@pytest.mark.parametrize("seed", range(20))
def test_menu_has_the_hull_and_only_options_that_are_what_they_say(seed: int) -> None:
    graph = random_step(seed, num_values=10).graphs[0]
    menu = unit_options(graph, most_options=12)
    hull = unit_hull(graph)
    assert set(hull) <= set(menu)
    assert len(menu) <= max(12, len(hull))
    assert len({option.stored for option in menu}) == len(menu)
    for option in menu:
        assert option == Evaluator(graph).option(*option.stored)


def test_no_plan_where_nothing_can_fit() -> None:
    profile = random_step(5, num_values=9, num_units=4)
    _, chain, _ = chain_of(profile)
    assert list(chain.best(profile.persistent_bytes)) == []


def test_measuring_takes_fewer_simulations_than_options_where_units_are_alike() -> None:
    profile = random_step(2, num_values=10, num_units=6)
    table, _, seen = chain_of(profile)
    assert len(seen) <= 2 + -(-len(table.rows[0].options) // 6)


def test_outputs_that_a_stride_drops_are_no_choice_of_the_unit() -> None:
    found = [single_outputs(random_step(seed, num_values=6, num_units=3)) for seed in range(10)]
    assert set(found) == {frozenset(), frozenset({"layers.2"})}
