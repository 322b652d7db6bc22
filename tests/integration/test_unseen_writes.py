"""Writes that the tape cannot see, because no unit is running: refused where they matter, harmless where they do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from blocks import built
from gradients import assert_same_gradients, gradients
from policies import FEW_PLANS, FULL, KEEP_ALL, NOTHING_KEPT, Policy
from recollect.applying import apply_policy
from recollect.errors import MutatedValueError

WIDTH = 8
few_plans = pytest.mark.parametrize("policy", FEW_PLANS.values(), ids=FEW_PLANS)


class Doubled(nn.Module):
    """Saves only the result of `exp`: plain autograd does not care what becomes of the input. [n, d] -> [n, d]."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, hidden: Tensor) -> Tensor:
        return (hidden * 0.5 + self.scale).exp() * 2


class Writes(nn.Module):
    """Calls a unit and then does something to its input or its output."""

    def __init__(self, write: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.unit = Doubled()
        self.write = write

    def forward(self, data: Tensor) -> Tensor:
        hidden = self.stem(data)
        return self.write(hidden, self.unit(hidden)).sum()


def input_is_written(hidden: Tensor, output: Tensor) -> Tensor:
    hidden.add_(1)
    return output + hidden


def residual_is_added_in_place(hidden: Tensor, output: Tensor) -> Tensor:
    output += hidden
    return output


def activation_in_place(hidden: Tensor, output: Tensor) -> Tensor:
    return torch.relu_(output) * hidden


def step(model: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return gradients(model, torch.randn(4, WIDTH))


@pytest.mark.parametrize("policy", [FULL, NOTHING_KEPT])
def test_written_input_is_refused_where_recompute_needs_it(policy: Policy) -> None:
    """The message names the unit, the op that needs the value, and what to do."""
    model = built(lambda: Writes(input_is_written))
    with (
        apply_policy(model, ["unit"], policy),
        pytest.raises(MutatedValueError, match=r"\[4, 8\], used by mul in unit, was changed in place 1 time .* copy"),
    ):
        step(model)


def test_written_input_is_fine_where_nothing_is_recomputed() -> None:
    model = built(lambda: Writes(input_is_written))
    expected = step(model)
    with apply_policy(model, ["unit"], KEEP_ALL):
        assert_same_gradients(expected, step(model))


@few_plans
@pytest.mark.parametrize("write", [residual_is_added_in_place, activation_in_place])
def test_written_output_is_fine(write: Callable[[Tensor, Tensor], Tensor], policy: Policy) -> None:
    model = built(lambda: Writes(write))
    expected = step(model)
    with apply_policy(model, ["unit"], policy):
        assert_same_gradients(expected, step(model))


@few_plans
def test_weights_that_change_between_forward_and_backward(policy: Policy) -> None:
    """An optimizer step at the wrong moment: refused with a plan as it is without one."""
    model = built(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()))

    def attempt() -> None:
        loss = model(torch.ones(2, WIDTH)).sum()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        loss.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        attempt()
    with apply_policy(model, ["0", "1"], policy), pytest.raises(RuntimeError, match="in ?place"):
        attempt()
