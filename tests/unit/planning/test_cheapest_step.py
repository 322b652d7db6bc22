"""The minimum cut of a whole step at prices: no plan is below it, and a choice costs as much as it says."""

import random
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from every_plan import all_plans, on_a_slow_tape
from recollect.planning.cheapest_step import CheapestStep
from recollect.planning.checkpoint_times import CheckpointTimes, checkpoint_times
from recollect.plans.action import Action
from recollect.profile.events import BACKWARD, DIES, OP, PHASE, RELEASE, SAVE, USE, StepLog
from recollect.profile.graph import OpRecord, UnitCall, UnitGraph, ValueRecord
from recollect.profile.profile import Profile
from recollect.simulation.decisions import CallActions, ValueActions
from recollect.simulation.simulate import simulate
from synthetic_step import random_step

NUM_PRICES = 8


def random_prices(found: CheckpointTimes, profile: Profile, rng: random.Random) -> NDArray[np.float64]:
    """Prices for a few moments, from next to nothing to more than all recompute."""
    seconds = sum(graph.forward_s for graph in profile.graphs)
    prices = np.zeros(len(found.events))
    for moment in rng.sample(range(len(prices)), k=min(len(prices), rng.choice((1, 1, 2, 3, 6)))):
        prices[moment] = seconds / 1000 * 10 ** rng.uniform(-2, 2)
    return prices


def step_of(seed: int, *, writes: bool = False) -> Profile:
    num_units, num_values = ((1, 7), (2, 4), (3, 3))[seed % 3]
    profile = random_step(
        seed, num_values=num_values, num_units=num_units, state_bytes=8, saved_part=0.8, writes=writes
    )
    return on_a_slow_tape(profile, seed // 2) if seed % 2 else profile


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("seed", range(15))
def test_no_plan_costs_less_at_any_prices(seed: int, writes: bool) -> None:
    profile = step_of(seed, writes=writes)
    # All moments, not only those that the bound looks at.
    found = checkpoint_times(profile, range(len(profile.log.events)))
    step = CheapestStep(profile, found)
    points = all_plans(profile)
    rng = random.Random(seed)
    for _ in range(NUM_PRICES):
        prices = random_prices(found, profile, rng)
        cost_s = step.at(prices).cost_s
        for peak_bytes, recompute_s in points:
            # Of a plan, no moment has more bytes than its peak.
            assert cost_s + prices @ (found.fixed_bytes - peak_bytes) <= recompute_s * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_the_choice_costs_what_the_cut_says(seed: int, writes: bool) -> None:
    profile = step_of(seed, writes=writes)
    found = checkpoint_times(profile, range(len(profile.log.events)))
    step = CheapestStep(profile, found)
    rng = random.Random(seed)
    for _ in range(NUM_PRICES):
        prices = random_prices(found, profile, rng)
        cut = step.at(prices)
        costs_s = cut.choice.recompute_s + prices @ cut.choice.kept_bytes
        assert cut.cost_s == pytest.approx(costs_s, rel=1e-11)
        assert cut.cost_s <= prices @ step.everything_kept().kept_bytes * (1 + 1e-12)
        missing_s = 1e-4 * costs_s
        assert costs_s - missing_s <= step.at(prices, missing_s=missing_s).cost_s <= costs_s * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_what_is_dropped_runs_again(seed: int) -> None:
    """The choice, as a plan, takes as long as the cut says."""
    profile = step_of(2 * seed)
    found = checkpoint_times(profile)
    step = CheapestStep(profile, found)
    rng = random.Random(seed)
    for _ in range(NUM_PRICES):
        choice = step.at(random_prices(found, profile, rng)).choice
        decisions = [
            CallActions(
                ValueActions.recomputing(dropped),
                output=Action.RECOMPUTE if len(profile.graph_of(call).values) - 1 in dropped else Action.KEEP,
            )
            for call, dropped in zip(profile.calls, step.dropped(choice), strict=True)
        ]
        assert simulate(profile, decisions).recompute_s == pytest.approx(choice.recompute_s)


@pytest.mark.parametrize("seed", range(4))
def test_other_units_of_time_and_bytes_give_the_same_choice(seed: int) -> None:
    profile = step_of(seed)
    found = checkpoint_times(profile)
    graphs = tuple(
        replace(
            graph,
            ops=tuple(replace(op, time_s=op.time_s * 1e-7) for op in graph.ops),
            tape_s=graph.tape_s * 1e-7,
            module_tape_s=tuple((module, seconds * 1e-7) for module, seconds in graph.module_tape_s),
        )
        for graph in profile.graphs
    )
    step, scaled = CheapestStep(profile, found), CheapestStep(replace(profile, graphs=graphs), found)
    rng = random.Random(seed)
    for _ in range(NUM_PRICES):
        prices = random_prices(found, profile, rng)
        cut, other = step.at(prices), scaled.at(prices * 1e-7)
        assert other.cost_s == pytest.approx(cut.cost_s * 1e-7, rel=1e-11)


def test_a_value_that_two_ops_read_costs_once() -> None:
    values = (
        ValueRecord("x", 8, None),
        ValueRecord("h", 100, 0),
        *(ValueRecord(name, 1000, op, saved=True) for op, name in enumerate(("p", "q"), start=1)),
    )
    ops = (OpRecord("h", (0,), (1,), 50.0), OpRecord("p", (1,), (2,), 1.0), OpRecord("q", (1,), (3,), 1.0))
    forward = ((OP, 0, 0), (OP, 0, 1), (SAVE, 0, 2, 0, 0), (OP, 0, 2), (SAVE, 0, 3, 1, 0))
    dies = tuple((DIES, 0, value) for value in (1, 2, 3))
    backward = ((PHASE, BACKWARD), (USE, 0), (RELEASE, 0), (USE, 1), (RELEASE, 1))
    log = StepLog((*forward, *dies, *backward))
    profile = Profile((UnitGraph(values, ops),), (UnitCall("layer", 0),), log, step_s=60.0)
    step = CheapestStep(profile, checkpoint_times(profile, [7]))
    cut = step.at(np.array([0.01]))
    assert cut.cost_s == pytest.approx(100 * 0.01 + 1 + 1)
    assert step.dropped(cut.choice) == [frozenset({2, 3})]


def test_without_prices_nothing_costs_anything() -> None:
    profile = step_of(0)
    found = checkpoint_times(profile)
    cut = CheapestStep(profile, found).at(np.zeros(len(found.events)))
    assert (cut.cost_s, cut.choice.recompute_s) == (0.0, 0.0)
