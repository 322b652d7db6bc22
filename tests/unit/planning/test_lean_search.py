"""The least peak: a matter of bytes alone; how close it is to the least of all plans is in `test_optimality.py`."""

import random
from dataclasses import replace

import pytest

import recollect
from budgets import least_bytes
from recollect.planning.classic import classic_plan
from recollect.planning.planners import plan
from recollect.profile.profile import Profile
from small_llama import llama_step
from synthetic_step import random_step


def with_other_times(profile: Profile, seed: int) -> Profile:
    """The same step, where each op and the tape take half to twice as long."""
    rng = random.Random(seed)
    graphs = tuple(
        replace(
            graph,
            ops=tuple(replace(op, time_s=op.time_s * 2 ** rng.uniform(-1, 1)) for op in graph.ops),
            tape_s=graph.tape_s * 2 ** rng.uniform(-1, 1),
        )
        for graph in profile.graphs
    )
    return replace(profile, graphs=graphs)


def accumulated() -> Profile:
    """A decoder of two layers that runs in each of three micro-steps."""
    model, batch = llama_step(hidden_size=16, vocab_size=16)

    def step() -> None:
        for _ in range(3):
            model(**batch).loss.backward()

    return recollect.record(model, step=step)


@pytest.fixture(scope="module", params=[3, "accumulated"])
def profile(request: pytest.FixtureRequest) -> Profile:
    if request.param == "accumulated":
        return accumulated()
    return random_step(request.param, num_values=14, num_units=6)


def test_the_least_peak_does_not_depend_on_times_can_be_planned_and_is_below_full_recompute(profile: Profile) -> None:
    steps = [with_other_times(profile, seed) for seed in range(2)]
    (budget,) = {least_bytes(step) for step in steps}
    made = plan(steps[1], budget)
    assert made.predicted_peak_bytes is not None
    assert made.predicted_peak_bytes <= budget < (classic_plan(profile, "full").predicted_peak_bytes or 0)
