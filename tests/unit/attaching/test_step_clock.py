"""What recompute takes is measured in steps that run anyway, and a plan that takes longer than predicted is made again."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn

import recollect
from blocks import Computes
from gradients import assert_same_gradients
from recollect.attaching import step_clock
from recollect.attaching.attached import Attached
from recollect.attaching.planned_step import PlannedStep
from recollect.attaching.step_clock import corrected
from recollect.attaching.timed_steps import Timed
from recollect.simulation.predicted import predicted_plan

SETTLED, TIMED = 3, 5
SQUARE = torch.randn(128, 128)
Attachment: TypeAlias = tuple[nn.Module, Attached, torch.optim.Optimizer, list[str]]


class Switch:
    """Whether the Function below takes its time, and how many products that is."""

    is_slow = False
    num_products = 100


class SlowAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(Switch.num_products * Switch.is_slow):
            torch.mm(SQUARE, SQUARE)
        output = x.tanh()
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (1 - ctx.saved_tensors[0] ** 2)


def layer() -> Computes:
    return Computes(
        lambda self, x: x + self.down(SlowAgain.apply(self.up(x))), up=nn.Linear(16, 64), down=nn.Linear(64, 16)
    )


def residual(self: Any, x: torch.Tensor) -> torch.Tensor:
    for one in self.layers:
        x = one(x)
    return x.square().mean()


X = torch.randn(512, 16)


def train(model: nn.Module, attached: Attached, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = model(X)
        Switch.is_slow = bool(attached.recorded_steps)
        loss.backward()
        Switch.is_slow = False
        optimizer.step()


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def attached() -> Iterator[Attachment]:
    torch.manual_seed(0)
    # On one thread, times are that thread's processor time: other processes do not change which plan is made again.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model, lines = Computes(residual, layers=nn.ModuleList(layer() for _ in range(6))), list[str]()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with recollect.attach(model, optimizer, "70%", log=lines.append) as found:
        yield model, found, optimizer, lines
    torch.set_num_threads(num_threads)
    Switch.is_slow, Switch.num_products = False, 100


def test_steps_that_take_longer_than_predicted_are_planned_again_once(
    attached: Attachment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_clock, "_SHORT_S", 0.0)  # Whatever the machine.
    model, handle, optimizer, lines = attached
    train(model, handle, optimizer, 1 + SETTLED + TIMED - 1)
    assert "measured_slowdown" not in handle.numbers and len(lines) == 1
    assert "slowdown not measured" in handle.report()
    before = handle.plan
    train(model, handle, optimizer, 1)
    assert len(lines) == 2 and "planned again for 512 x 16, since steps took +" in lines[1]
    assert before is not None and handle.plan is not None
    assert (handle.plan.predicted_slowdown or 0) > (before.predicted_slowdown or 0)
    Switch.num_products *= 4
    train(model, handle, optimizer, SETTLED + TIMED)
    assert len(lines) == 2
    assert handle.numbers["measured_slowdown"] > 0
    assert f"slowdown {handle.numbers['measured_slowdown']:+.1%}: of " in handle.report()
    assert handle.recorded_steps == [0]
    planned = gradients_of(model)
    handle.remove()
    train(model, handle, optimizer, 1)
    assert_same_gradients(gradients_of(model), planned)


def test_a_step_that_does_less_than_its_plan_foresees_is_not_timed(attached: Attachment) -> None:
    model, handle, optimizer, _ = attached
    (model(X) + model(X)).backward()
    optimizer.step()
    train(model, handle, optimizer, SETTLED + TIMED + 2)
    assert "measured_slowdown" not in handle.numbers


def step_of(handle: Attached) -> PlannedStep:
    return handle.planned[-1]


def measured(planned: PlannedStep, slowdown: float, *, speed: float = 1.0) -> Timed:
    """Return what steps took whose slowdown is this, and that ran without recompute `speed` times as long as recorded."""
    plain_s = planned.profile.step_s * speed
    return Timed(5, plain_s * (1 + slowdown), plain_s * slowdown, plain_s * slowdown, 0.0)


@pytest.mark.parametrize("speed", [1.0, 1.5])
def test_the_corrected_prices_predict_what_was_measured(attached: Attachment, speed: float) -> None:
    model, handle, optimizer, _ = attached
    train(model, handle, optimizer, 1)
    # As if the recorded step had taken a second, so that it is none of those that are too short to be judged.
    planned = replace(step_of(handle), profile=replace(step_of(handle).profile, step_s=1.0))
    plan = planned.plan = predicted_plan(planned.profile, planned.plan)
    assert plan.slowdown_error is not None and plan.predicted_slowdown is not None
    most = plan.predicted_slowdown + plan.slowdown_error
    assert corrected(planned, measured(planned, most - 0.001, speed=speed)) is None
    profile = corrected(planned, measured(planned, most + 0.2, speed=speed))
    assert profile is not None and profile.host is not None
    assert {graph.again_op_s for graph in profile.graphs} == {profile.host.again_op_s}
    again = predicted_plan(profile, planned.plan).predicted_slowdown or 0
    # What the tape adds in forward is not in the measured time of this test.
    assert again == pytest.approx(most + 0.2, abs=0.01)


def test_a_short_step_is_not_corrected(attached: Attachment) -> None:
    model, handle, optimizer, _ = attached
    train(model, handle, optimizer, 1)
    planned = replace(step_of(handle), profile=replace(step_of(handle).profile, step_s=0.001))
    planned.plan = predicted_plan(planned.profile, planned.plan)
    assert corrected(planned, measured(planned, 3.0)) is None
