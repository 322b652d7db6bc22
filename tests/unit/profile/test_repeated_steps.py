"""Runs of equal micro-steps, stored once: every plan has the peak and the time that it has for the whole step."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from blocks import Stack
from offload_plans import random_offload_plan
from recollect.planning.choose import Planner
from recollect.planning.trips import scheduled
from recollect.plans.plan import Plan
from recollect.profile.host_times import HostTimes
from recollect.profile.profile import Profile
from recollect.profile.repeated_steps import fold
from recollect.simulation.clocks import step_times
from recollect.simulation.copy_clock import Link, waits_of
from recollect.simulation.decisions import decide
from recollect.simulation.simulate import Simulation, simulate
from recorded_steps import measured_bytes, random_plan, recorded
from two_clocks import on_host

NUM_MICRO_STEPS = 7

Whole = tuple[Profile, Callable[[Plan | None], int], int]
"""A step, what measures its peak under a plan, and how many micro-steps of it are to be stored."""


def forward_backward(model: Stack, batch: Tensor) -> Tensor:
    output = model(batch)
    loss = output.square().mean()
    loss.backward()
    return output


def plainly(model: Stack, batch: Tensor) -> None:
    for _ in range(NUM_MICRO_STEPS):
        forward_backward(model, batch)


def holding_the_output(model: Stack, batch: Tensor) -> None:
    output = None
    for _ in range(NUM_MICRO_STEPS):
        output = forward_backward(model, batch)
    del output


def listing_losses(model: Stack, batch: Tensor) -> None:
    losses = []
    for _ in range(NUM_MICRO_STEPS):
        losses.append(forward_backward(model, batch).square().mean().detach())


def adding_losses(model: Stack, batch: Tensor) -> None:
    total = torch.zeros(())
    for _ in range(NUM_MICRO_STEPS):
        loss = model(batch).square().mean()
        loss.backward()
        total = total + loss.detach()


def in_pairs(model: Stack, batch: Tensor) -> None:
    for _ in range(NUM_MICRO_STEPS):
        forward_backward(model, batch)
        forward_backward(model, batch[:3])


def before_the_optimizer(model: Stack, batch: Tensor) -> None:
    plainly(model, batch)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


LOOPS = {
    "plain": (plainly, 2),
    "output held": (holding_the_output, 3),
    "losses in a list": (listing_losses, 2),
    "losses added": (adding_losses, 3),
    "pairs": (in_pairs, 4),
    "optimizer": (before_the_optimizer, 2),
}


@pytest.fixture(scope="module", params=LOOPS)
def whole(request: pytest.FixtureRequest) -> Whole:
    loop, num_stored = LOOPS[request.param]
    torch.manual_seed(0)
    model, batch = Stack(width=16, depth=3), torch.randn(20, 16)
    step = partial(loop, model, batch)
    profile = recorded(model, step, [batch])
    return profile, partial(measured_bytes, profile, model, step), num_stored


def played(profile: Profile, plan: Plan) -> Simulation:
    return simulate(profile, decide(profile, plan))


def test_stores_few_micro_steps(whole: Whole) -> None:
    profile, _, num_stored = whole
    folded = fold(profile)
    num_units = 5
    assert len(folded.calls) == num_stored * num_units
    assert sum(call.num_runs for call in folded.calls) == len(profile.calls)
    assert len(folded.log.events) < (num_stored + 0.5) / NUM_MICRO_STEPS * len(profile.log.events)
    assert fold(folded) == folded


def test_every_plan_costs_the_same(whole: Whole) -> None:
    profile, measure, _ = whole
    folded = fold(profile)
    for seed in range(12):
        plan = Plan({}) if seed == 0 else random_plan(profile, seed)
        one, other = played(profile, plan), played(folded, plan)
        assert other.peak_bytes == one.peak_bytes, seed
        assert other.backward_peak_bytes == one.backward_peak_bytes
        assert other.recompute_s == pytest.approx(one.recompute_s)
        assert other.recomputed_ops == one.recomputed_ops
        if seed < 4:
            assert one.peak_bytes - 4096 <= measure(plan) <= one.peak_bytes


def test_clocks_count_micro_steps_that_are_not_stored(whole: Whole) -> None:
    """The host's and the device's, and that of copies to host memory, for which every micro-step waits."""
    profile, _, _ = whole
    host = HostTimes(forward_op_s=1e-5, backward_op_s=2e-5, unit_s=3e-5, again_op_s=1e-5)
    link = Link(1e7, 1e7)
    for seed in range(4):
        one = on_host(profile, host)
        one, other = ((p, decide(p, random_plan(profile, seed))) for p in (one, fold(one)))
        assert step_times(*other) == pytest.approx(step_times(*one))
        plan = scheduled(profile, random_offload_plan(profile, seed), link)
        waited_s, expected_s = (waits_of(p, decide(p, plan), link) for p in (fold(profile), profile))
        assert expected_s > 0 and waited_s == pytest.approx(expected_s)


def test_planning_agrees_with_the_whole_step() -> None:
    torch.manual_seed(0)
    model, batch = Stack(width=16, depth=3), torch.randn(20, 16)
    profile = recorded(model, partial(plainly, model, batch), [batch])
    budget = round(0.85 * Planner(profile).plain_peak_bytes)
    one, other = Planner(profile).plan(budget), Planner(fold(profile)).plan(budget)
    assert other.predicted_slowdown == pytest.approx(one.predicted_slowdown)
    assert other.bound_slowdown == pytest.approx(one.bound_slowdown, rel=0.02)


def test_different_shapes_are_not_folded() -> None:
    model, batch = Stack(width=16, depth=2), torch.randn(20, 16)

    def step() -> None:
        for size in (5, 9, 13, 17):
            forward_backward(model, batch[:size])

    profile = recorded(model, step, [batch])
    assert fold(profile) is profile


def test_a_step_with_one_backward_is_not_folded() -> None:
    model, batch = Stack(width=16, depth=2), torch.randn(20, 16)

    def step() -> None:
        loss = sum(model(batch).square().mean() for _ in range(4))
        loss.backward()

    profile = recorded(model, step, [batch])
    assert fold(profile) is profile
