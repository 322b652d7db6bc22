"""The peak of a step while it is recorded: what it is measured to be, and that it stays within a budget that a plan keeps."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect.attaching.attached import Attached
from recollect.costs.op_costs import MeasuredCosts
from recollect.errors import BudgetTooSmallError, BudgetWarning
from recollect.measuring.meter import measure_peak
from residual_model import Model

CPU = torch.device("cpu")
Zero = Callable[[nn.Module, torch.optim.Optimizer], object]


def test_the_peak_of_a_step_is_measured_as_by_the_meter() -> None:
    held = [torch.zeros(1000), torch.zeros(500)]

    def step() -> Tensor:
        made = torch.zeros(3000).exp()
        held.clear()
        return torch.zeros(2000) + made.sum()

    expected = measure_peak(step, device=CPU).peak_bytes
    held += [torch.zeros(1000), torch.zeros(500)]
    costs = MeasuredCosts(CPU, looks_around=True)
    with costs.recording():
        step()
    assert costs.step_bytes == expected
    plain = MeasuredCosts(CPU)
    with plain.recording():
        step()
    assert plain.step_bytes == 0


def free(net: nn.Module, _: torch.optim.Optimizer) -> None:
    """Free the gradients by hand, which nothing sees in the first step, so that the second one is recorded, too."""
    for parameter in net.parameters():
        parameter.grad = None


def train(budget: int | str, num_steps: int, zero: Zero = free) -> Attached:
    net = Model(inner=128)  # values that are larger than what units get and return
    optimizer = torch.optim.AdamW(net.parameters())
    attached = recollect.attach(net, optimizer, budget, log=lambda _: None)
    for _ in range(num_steps):
        loss = net(torch.randn(100, 32))
        zero(net, optimizer)
        loss.backward()
        optimizer.step()
    attached.remove()
    return attached


@pytest.mark.parametrize("zero", [lambda _, optimizer: optimizer.zero_grad(), lambda net, _: net.zero_grad()])
def test_the_first_step_tells_when_zero_grad_frees_the_gradients_of_those_that_repeat(zero: Zero) -> None:
    seen, by_hand = train("100%", 2, zero), train("100%", 2)
    assert (seen.recorded_steps, by_hand.recorded_steps) == ([0], [0, 1])
    # Beyond what the other model takes, which is counted too.
    first, second = by_hand.planned
    assert seen.planned[0].work_bytes == second.work_bytes > first.work_bytes
    assert by_hand.budget_bytes == second.budget_bytes > first.budget_bytes, "a percentage is of what repeats"


def test_gradients_that_are_set_to_zero_are_recorded_once_they_are_there() -> None:
    assert train("100%", 2, lambda _, optimizer: optimizer.zero_grad(set_to_none=False)).recorded_steps == [0, 1]


def least_bytes() -> int:
    """The least peak of any plan for the second step."""
    profile = train("100%", 3).planned[-1].profile
    try:
        return recollect.plan(profile, 1).predicted_peak_bytes or 0
    except BudgetTooSmallError as error:
        return error.least_peak_bytes


def test_a_later_recorded_step_needs_no_more_than_a_plan() -> None:
    budget_bytes = int(1.04 * least_bytes())
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        attached = train(budget_bytes, 3)
    assert attached.recorded_steps == [0, 1]
