"""The least peak: a matter of bytes alone, and close to the least that any plan has."""

import random
from dataclasses import replace

import pytest
import torch

import recollect
from every_plan import all_plans
from recollect.errors import BudgetTooSmallError
from recollect.lab.models.architectures import llama_config
from recollect.lab.models.gpt import GPTModel
from recollect.planning.classic import classic_plan
from recollect.planning.lean_search import leanest
from recollect.planning.option_table import Candidate
from recollect.planning.planners import plan
from recollect.profile.profile import Profile
from recollect.simulation.peak_sums import PeakSums
from recollect.simulation.program import Program
from recollect.simulation.windows import windows
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


def least_peak(profile: Profile) -> int:
    with pytest.raises(BudgetTooSmallError) as refused:
        plan(profile, 1)
    return refused.value.least_peak_bytes


def found(profile: Profile) -> Candidate:
    parts = windows(profile)
    return leanest(PeakSums(Program(profile, parts)))


def accumulated() -> Profile:
    """A decoder of two layers that runs in each of three micro-steps."""
    torch.manual_seed(0)
    model = GPTModel(llama_config(num_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=16))
    tokens = torch.randint(0, 16, (2, 16))

    def step() -> None:
        for _ in range(3):
            model(tokens=tokens, labels=tokens).loss.backward()

    return recollect.record(model, step=step)


@pytest.fixture(scope="module", params=[3, "accumulated"])
def profile(request: pytest.FixtureRequest) -> Profile:
    if request.param == "accumulated":
        return accumulated()
    return random_step(request.param, num_values=14, num_units=6)


def test_the_least_peak_does_not_depend_on_times_can_be_planned_and_is_below_full_recompute(profile: Profile) -> None:
    steps = [with_other_times(profile, seed) for seed in range(2)]
    (budget,) = {least_peak(step) for step in steps}
    made = plan(steps[1], budget)
    assert made.predicted_peak_bytes is not None
    assert made.predicted_peak_bytes <= budget < (classic_plan(profile, "full").predicted_peak_bytes or 0)


def test_the_least_peak_is_mostly_that_of_all_plans() -> None:
    """Measured with 40 seeds: 38 equal; the others 2 and 4 % above."""
    gaps = []
    for seed in range(12):
        num_units = 1 + seed % 3
        profile = random_step(seed, num_values=(7, 4, 3)[num_units - 1], num_units=num_units)
        least = min(peak for peak, _ in all_plans(profile))
        gaps.append(found(profile).peak_bytes / least - 1)
    assert sum(gap == 0 for gap in gaps) >= 10
    assert max(gaps) <= 0.1
