"""The parts that the planner is made of: windows, menus, the chain's model of peaks."""

from __future__ import annotations

import itertools
import random

import pytest

from recollect.planning.chain import Chain
from recollect.planning.hull import evaluate, unit_hull
from recollect.planning.option_table import Ladder, Levels
from recollect.planning.unit_options import every_choice, unit_options
from recollect.planning.output_choices import single_outputs
from recollect.profile.events import BACKWARD, FORWARD, OPTIMIZER
from recollect.profile.profile import Profile
from recollect.simulation.simulate import CallDecision, Simulation, simulate
from recollect.simulation.windows import windows
from synthetic_step import random_step


def chain_of(profile: Profile) -> tuple[Ladder, Chain, list[Levels]]:
    """A chain over the menus of a step, and the levels that it had simulated."""
    ladder = Ladder(profile, options_of=unit_options)
    found = windows(profile)
    seen: list[Levels] = []

    def play(levels: Levels) -> Simulation:
        seen.append(levels)
        return simulate(profile, ladder.decisions(levels), windows=found)

    return ladder, Chain(ladder, found, play, most_probes=64), seen


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
    decisions = [CallDecision(frozenset(i for i in droppable if rng.random() < 0.5)) for _ in profile.calls]
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
    assert len({option.keep for option in menu}) == len(menu)
    for option in menu:
        assert option == evaluate(graph, option.keep)
    assert {option.keep for option in menu} <= {option.keep for option in every_choice(graph)}


def test_every_choice_has_all_of_a_small_unit() -> None:
    graph = random_step(3, num_values=6).graphs[0]
    produced = [i for i, value in enumerate(graph.values) if value.producer is not None]
    subsets = itertools.chain.from_iterable(itertools.combinations(produced, n) for n in range(len(produced) + 1))
    assert {o.keep for o in every_choice(graph)} == {evaluate(graph, keep).keep for keep in subsets}


def test_every_choice_of_a_large_unit_is_its_menu() -> None:
    graph = random_step(3, num_values=14).graphs[0]
    assert every_choice(graph) == unit_options(graph)


@pytest.mark.parametrize("seed", range(10))
def test_model_of_the_peak_is_exact_where_units_do_not_share_work(seed: int) -> None:
    profile = random_step(seed, num_values=9, num_units=5)
    ladder, chain, _ = chain_of(profile)
    rng = random.Random(seed)
    num_exact = 0
    for _ in range(20):
        levels = tuple(rng.randrange(len(rung.options)) for rung in ladder.rungs)
        simulated = simulate(profile, ladder.decisions(levels)).peak_bytes
        num_exact += chain.predicted_peak(levels) == simulated
        # The first unit's window differs: it has no earlier unit's output to hold.
        assert abs(chain.predicted_peak(levels) - simulated) <= 0.25 * simulated
    # On units of nine values the working set is most of the peak; 4 to 20 of 20 are exact.
    assert num_exact >= 4


@pytest.mark.parametrize("seed", range(10))
def test_correction_makes_the_model_say_what_the_simulation_said(seed: int) -> None:
    profile = random_step(seed, num_values=9, num_units=4)
    ladder, chain, _ = chain_of(profile)
    levels = tuple(len(rung.options) // 2 for rung in ladder.rungs)
    simulation = simulate(profile, ladder.decisions(levels), windows=windows(profile))
    chain.correct(levels, simulation)
    peaks = [p for w, p in zip(windows(profile), simulation.window_peaks, strict=True) if w.call >= 0]
    assert chain.predicted_peak(levels) == max(peaks)


def test_no_plan_where_nothing_can_fit() -> None:
    profile = random_step(5, num_values=9, num_units=4)
    _, chain, _ = chain_of(profile)
    assert list(chain.best(profile.persistent_bytes)) == []


def test_measuring_takes_fewer_simulations_than_options_where_units_are_alike() -> None:
    profile = random_step(2, num_values=10, num_units=6)
    ladder, _, seen = chain_of(profile)
    assert len(seen) <= 2 + -(-len(ladder.rungs[0].options) // 6)


def test_outputs_that_a_stride_drops_are_no_choice_of_the_unit() -> None:
    found = [single_outputs(random_step(seed, num_values=6, num_units=3)) for seed in range(10)]
    assert set(found) == {frozenset(), frozenset({"layers.2"})}
