"""The peak of a step while it is recorded: what it is measured to be, and that it stays within a budget that a plan keeps."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

import recollect
from recollect.attaching.attached import Attached
from recollect.costs.op_costs import MeasuredCosts
from recollect.errors import BudgetTooSmallError, BudgetWarning
from recollect.measuring.meter import measure_peak

CPU = torch.device("cpu")


class Net(nn.Module):
    """Units whose values are larger than what they get and return."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.body:
            x = x + block(x)
        return x.square().mean()


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


def train(budget: int | str, num_steps: int) -> Attached:
    """Train with gradients that are alive in forward from the second step on, which is recorded, too."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    attached = recollect.attach(net, optimizer, budget, log=lambda _: None)
    for _ in range(num_steps):
        loss = net(torch.randn(400, 64))
        for parameter in net.parameters():
            parameter.grad = None  # Seen by nobody, unlike zero_grad, so that the first step does not tell.
        loss.backward()
        optimizer.step()
    attached.remove()
    return attached


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
