"""`verify` with a step of the user's own, and what it says of the time that a step takes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import recollect
from block_plans import ROWS, full, stack
from blocks import Stack, mean_square
from recollect.byte_format import format_bytes
from recollect.plans.plan import Plan
from recollect.verification import verify as of_verify
from watch import Watch


def model_and_plan() -> tuple[nn.Module, Plan]:
    model = stack()
    return model, full(model, ROWS, mean_square)


def test_the_optimizer_of_a_step_is_where_it_was() -> None:
    model, plan = model_and_plan()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step() -> None:
        mean_square(model(ROWS)).backward()
        optimizer.step()

    step()
    before = copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.param_groups[0]["lr"] = 0.05
    report = recollect.verify(model, None, plan, step=step, optimizer=optimizer)
    assert report.equal and report.compared == "step"
    after = optimizer.state_dict()
    assert after["param_groups"][0]["lr"] == 0.05
    assert before.keys() == after["state"].keys() and before
    for number, state in before.items():
        assert all(torch.equal(tensor, after["state"][number][name]) for name, tensor in state.items())


class FloatMomentum(torch.optim.Optimizer):
    """Momentum in 32 bits, whatever the type of the parameters, and a rate that its user may change from outside."""

    def __init__(self, parameters: Any, rate: torch.Tensor) -> None:
        super().__init__(parameters, {"lr": rate})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros(parameter.shape))
                momentum.mul_(0.9).add_(parameter.grad)
                parameter.sub_((group["lr"] * momentum).to(parameter.dtype))


def test_an_optimizer_keeps_its_own_tensors() -> None:
    model = stack().bfloat16()
    rate, rows = torch.tensor(0.1), ROWS.bfloat16()
    optimizer = FloatMomentum(model.parameters(), rate)

    def step() -> None:
        mean_square(model(rows)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    before = [(state["momentum"], state["momentum"].clone()) for state in optimizer.state.values()]
    plan = full(model, rows, mean_square)
    assert recollect.verify(model, None, plan, step=step, optimizer=optimizer, time=False).equal
    for (own, content), state in zip(before, optimizer.state.values(), strict=True):
        assert state["momentum"] is own and torch.equal(own, content)
    assert optimizer.param_groups[0]["lr"] is rate


def test_another_model_that_a_step_trains_is_where_it_was() -> None:
    """Else each run would begin from different weights of a GAN's discriminator, and gradients would differ."""
    model, plan = model_and_plan()
    judge = nn.Linear(len(ROWS), 1)
    optimizers = [torch.optim.SGD(its.parameters(), lr=0.1) for its in (model, judge)]
    before = judge.weight.detach().clone()

    def step() -> None:
        mean_square(judge(model(ROWS))).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    assert recollect.verify(model, None, plan, step=step, optimizer=optimizers, time=False).equal
    assert torch.equal(judge.weight, before)


@pytest.mark.parametrize("is_left", [True, False])
def test_gradients_that_a_step_leaves_are_named_where_they_are_more_than_planned(is_left: bool) -> None:
    torch.manual_seed(0)
    model = Stack(width=64, depth=3)

    def step() -> None:
        mean_square(model(ROWS.repeat(1, 4))).backward()
        if not is_left:
            model.zero_grad()

    plan = recollect.classic_plan(recollect.record(model, step=step), "full")
    model.zero_grad()
    report = str(recollect.verify(model, None, plan, step=step, time=False))
    said = "gradients of its last run ({}), and was recorded without:\n{}have it begin with zero_grad(), or record it"
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    assert (said.format(format_bytes(nbytes), " " * 17) in report) == is_left


def test_a_plan_that_runs_more_ops_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = model_and_plan()
    times: list[int] = []

    def counted(run: Callable[[], Any], _: torch.device) -> tuple[Any, float]:
        with Watch() as watch:
            result = run()
        times.append(len(watch.history))
        return result, times[-1]

    monkeypatch.setattr(of_verify, "timed", counted)
    report = recollect.verify(model, ROWS, plan, loss_fn=mean_square)
    plain, planned = set(times[::2]), set(times[1::2])
    assert len(plain) == len(planned) == 1
    assert report.measured_slowdown == planned.pop() / plain.pop() - 1 > 0
    assert len(times) == 6 and len(report.slowdowns) == 2, (
        "two rounds that agree are enough, after steps that do not count"
    )


@pytest.mark.parametrize(
    ("fourth_s", "text"),
    [
        (1.1, "25.0% (10.0% to 40.0% in 5 rounds, predicted "),
        (0.6, "25.0% (-40.0% to 40.0% in 5 rounds: times too noisy to judge it by, predicted "),
    ],
)
def test_rounds_that_differ_are_followed_by_more_up_to_five(
    monkeypatch: pytest.MonkeyPatch, fourth_s: float, text: str
) -> None:
    model, plan = model_and_plan()
    seconds = iter([1.0, 9.0, 1.0, fourth_s, 1.0, 1.4, 1.0, 1.2, 1.0, 1.3, 1.0, 1.25])
    monkeypatch.setattr(of_verify, "timed", lambda run, _: (run(), next(seconds)))
    report = recollect.verify(model, ROWS, plan, loss_fn=mean_square)
    assert report.slowdowns == pytest.approx((fourth_s - 1, 0.4, 0.2, 0.3, 0.25))
    assert str(report).splitlines()[-1].startswith(f"slowdown         {text}")


def test_time_is_measured_only_if_asked_for() -> None:
    model, plan = model_and_plan()
    report = recollect.verify(model, ROWS, plan, loss_fn=mean_square, time=False)
    assert report.equal and report.measured_slowdown is None and report.slowdowns == ()
    assert "slowdown" not in str(report)
