"""Writes that the tape cannot see, because no unit is running: refused where they matter, harmless where they do not."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from blocks import Computes, built
from gradients import assert_same_gradients
from policies import FEW_PLANS, FULL, Policy
from recollect.applying import apply_policy
from recollect.errors import MutatedValueError

WIDTH = 8
few_plans = pytest.mark.parametrize("policy", FEW_PLANS.values(), ids=FEW_PLANS)


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


# Writes that raise no version


def two_shifted() -> nn.Module:
    """Two units that read a bias, a buffer and what they are given, none of which plain autograd saves. [n, d] -> []."""

    def shifted(self: Any, hidden: Tensor, extra: Tensor) -> Tensor:
        return torch.sin(torch.tanh(self.linear(hidden)) + self.shift + extra)

    def both(self: Any, hidden: Tensor, extra: Tensor) -> Tensor:
        for unit in self.units:
            hidden = unit(hidden, extra)
        return hidden.square().sum()

    units = [Computes(shifted, linear=nn.Linear(WIDTH, WIDTH), shift=torch.zeros(WIDTH)) for _ in "ab"]
    return Computes(both, units=nn.ModuleList(units))


def write_buffers(model: Any, batch: np.ndarray) -> None:
    for unit in model.units:
        unit.shift.data.add_(1)


def write_biases(model: Any, batch: np.ndarray) -> None:
    for unit in model.units:
        unit.linear.bias.data.add_(1)


def refill_batch(model: Any, batch: np.ndarray) -> None:
    batch[:] = 1


@pytest.mark.parametrize("length", [1, 40_000])
@pytest.mark.parametrize(
    ("write", "what"),
    [(write_buffers, r"\[8\], used by add in units\.1"), (write_biases, r"\[8\], used by addmm in units\.1\.linear")]
    + [(refill_batch, r"8\], used by add in units\.1")],
)
def test_writes_that_raise_no_version_are_refused(write: Any, what: str, length: int) -> None:
    """Between forward and backward; what was written is read again, and differs."""
    model = built(two_shifted)
    batch = np.zeros((length, WIDTH), np.float32)
    with apply_policy(model, ["units.0", "units.1"], FULL):
        loss = model(torch.randn(length, WIDTH), torch.from_numpy(batch))
        write(model, batch)
        with pytest.raises(
            MutatedValueError, match=what + r".* was changed in place \(through `\.data` or NumPy\) before"
        ):
            loss.backward()


def test_writes_after_backward_are_fine() -> None:
    model = built(two_shifted)
    batch = np.zeros((1, WIDTH), np.float32)
    with apply_policy(model, ["units.0", "units.1"], FULL):
        for write in (write_buffers, write_biases, refill_batch):
            model(torch.randn(4, WIDTH), torch.from_numpy(batch)).backward()
            write(model, batch)


def test_write_to_what_autograd_saved_is_as_without_a_plan() -> None:
    def step(model: Any) -> dict[str, Tensor]:
        data = torch.ones(4, WIDTH, requires_grad=True)
        loss = model(data).sum()
        model.scale.data.mul_(3)
        loss.backward()
        model.scale.data.div_(3)
        assert data.grad is not None
        return {"data": data.grad}

    model = Computes(lambda self, hidden: hidden.sin() * self.scale, scale=nn.Parameter(torch.ones(WIDTH)))
    expected = step(model)
    with apply_policy(model, [""], FULL):
        assert_same_gradients(expected, step(model))
