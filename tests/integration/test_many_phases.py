"""Steps with several forwards and backwards, in any order: predicted peaks against measured ones, plans, bounds, pictures."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import recollect
from blocks import Stack, mean_square
from budgets import budgets
from predictions import MOST_OVER_BYTES
from recollect.planning.bound import LowerBound
from recollect.planning.choose import Planner
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile
from recollect.simulation.decisions import decide
from recollect.simulation.peak_sums import PeakSums
from recollect.simulation.simulate import simulate
from recorded_steps import measured_bytes, random_plan, recorded


class Two(nn.Module):
    """Two stacks, whose layers are all units."""

    def __init__(self) -> None:
        super().__init__()
        self.one = Stack(width=16, depth=3)
        self.other = Stack(width=16, depth=2)


def pair(model: Two, batch: Tensor) -> None:
    loss = mean_square(model.one(batch)) + mean_square(model.one(2 * batch))
    loss.backward()


def two_losses(model: Two, batch: Tensor) -> None:
    """The first forward's backward runs while the second forward waits for its own."""
    first, second = mean_square(model.one(batch)), mean_square(model.one(2 * batch))
    first.backward()
    second.backward()


def micro_steps(model: Two, batch: Tensor) -> None:
    for size in (20, 40, 30):
        loss = mean_square(model.one(batch[:size]))
        loss.backward()


def towers(model: Two, batch: Tensor) -> None:
    loss = mean_square(model.one(batch) - model.other(batch)) + mean_square(model.other(batch[:8]))
    loss.backward()


def update(module: nn.Module) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    optimizer.step()
    optimizer.zero_grad()


def adversaries(model: Two, batch: Tensor) -> None:
    """As a GAN: one model's step on the other's detached output, then the other's through the first."""
    fake = model.one.blocks[0](batch)
    loss = mean_square(model.other(batch)) - mean_square(model.other(fake.detach()))
    loss.backward()
    update(model.other)
    loss = mean_square(model.other(fake))
    loss.backward()
    update(model)


def gradient_penalty(model: Two, batch: Tensor) -> None:
    inputs = batch.clone().requires_grad_()
    output = model.one(inputs)
    (gradient,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
    loss = mean_square(output) + mean_square(gradient)
    del output, gradient
    loss.backward()


def with_a_teacher(model: Two, batch: Tensor) -> None:
    with torch.no_grad():
        target = model.other(batch)
    loss = mean_square(model.one(batch) - target)
    loss.backward()


STEPS = (pair, two_losses, micro_steps, towers, adversaries, gradient_penalty, with_a_teacher)


@dataclass
class Recorded:
    profile: Profile
    measure: Callable[[Plan | None], int]


@pytest.fixture(scope="module", params=STEPS, ids=lambda step: step.__name__)
def step(request: pytest.FixtureRequest) -> Recorded:
    torch.manual_seed(0)
    model, batch = Two(), torch.randn(40, 16)
    layers = ["one.stem", *[f"one.{p}" for p in model.one.layers], "one.head"]
    layers += ["other.stem", *[f"other.{p}" for p in model.other.layers], "other.head"]

    once = partial(request.param, model, batch)
    profile = recorded(model, once, [batch], units=layers)
    return Recorded(profile, lambda plan: measured_bytes(profile, model, once, plan))


def test_peaks_are_those_measured(step: Recorded) -> None:
    sums = PeakSums.of(step.profile)
    plans = [Plan({}), recollect.classic_plan(step.profile, "full"), *(random_plan(step.profile, s) for s in range(6))]
    for number, plan in enumerate(plans):
        decisions = decide(step.profile, plan)
        predicted_bytes = simulate(step.profile, decisions).peak_bytes
        assert sums.peaks(decisions).peak_bytes == predicted_bytes
        over_bytes = predicted_bytes - step.measure(plan)
        assert 0 <= over_bytes <= MOST_OVER_BYTES, (number, over_bytes)


def test_plans_fit_and_no_bound_is_above_them(step: Recorded) -> None:
    planner = Planner(step.profile)
    fixed_bytes = step.profile.persistent_bytes
    bound, within = LowerBound(step.profile), budgets(planner, (0.0, 0.4, 0.8))
    assert fixed_bytes < within[0] <= planner.plain_peak_bytes
    for budget_bytes in within:
        plan = planner.plan(budget_bytes)
        assert step.measure(plan) <= budget_bytes
        assert bound.added_s(budget_bytes) / step.profile.step_s <= plan.predicted_slowdown + 1e-9
    for seed in range(6):
        simulation = simulate(step.profile, decide(step.profile, random_plan(step.profile, seed)))
        assert bound.added_s(simulation.peak_bytes) <= simulation.recompute_s + 1e-12
