"""A step of a run: its learning rate, and gradients of accumulated micro-batches."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blocks import Computes
from recollect.lab.train.exchange import Exchange
from recollect.lab.train.optim_flags import OptimFlags
from recollect.lab.train.optimizer_step import learning_rate_at


def test_warm_up_rises_from_its_first_step_to_the_highest_rate() -> None:
    flags = OptimFlags(steps=100, warmup_steps=4, learning_rate=1.0, min_lr_fraction=0.1)
    rates = [learning_rate_at(step, flags) for step in range(100)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and max(rates) == 1.0
    assert rates[99] == pytest.approx(0.1) and rates[4:] == sorted(rates[4:], reverse=True)
    for steps in (1, 10):
        assert learning_rate_at(0, OptimFlags(steps=steps, warmup_steps=0, learning_rate=1.0)) == 1.0


def test_gradients_of_micro_batches_are_those_of_their_mean_loss() -> None:
    """Halves are exact in floating point, so that means of two are equal bit for bit."""
    torch.manual_seed(0)

    def forward(self: Any, inputs: Tensor, targets: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=nn.functional.mse_loss(self.linear(inputs), targets))

    model = Computes(forward, linear=nn.Linear(8, 8))
    batches = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(2)]
    losses = [model(*batch).loss for batch in batches]
    expected = (
        torch.autograd.grad(losses[0], [*model.parameters()]),
        torch.autograd.grad(losses[1], [*model.parameters()]),
    )
    loss = Exchange().accumulate(model, batches, accumulation=2)
    assert torch.equal(loss, (losses[0] + losses[1]) / 2)
    for parameter, first, second in zip(model.parameters(), *expected, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, (first + second) / 2)
