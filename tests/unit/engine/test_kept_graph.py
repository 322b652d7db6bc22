"""Backwards that keep their graph: nothing that was computed again stays for the next one, and both get what they need."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import recollect
from blocks import Block, Computes
from recollect._torch_parallel import split_backward
from recollect.applying import applied_to
from recollect.engine.tape import Tape
from recollect.engine.tape_forwards import UnitForward
from recollect.profile.events import GIVE_BACK, LET_GO, PEEK
from recollect.profile.profile import Profile

SHAPE = (64, 32)
# What recording adds for bytes that ops do not report, and the gradient of the last step's input, which it found held.
ROOM = 1024 + 64 * 32 * 4


def layer() -> Computes:
    """A layer with dropout, a write in place, and a value that two ops read."""

    def run(self: Any, x: Tensor) -> Tensor:
        hidden = functional.relu_(self.up(x))
        return x + functional.dropout(self.down(hidden * torch.sigmoid(hidden)), 0.1)

    return Computes(run, up=nn.Linear(32, 128), down=nn.Linear(128, 32))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer() for _ in range(4)))


def halves(loss: Tensor, x: Tensor, stage: nn.Module) -> None:
    split_backward(loss, [x], stage)


def twice(loss: Tensor, _x: Tensor, _stage: nn.Module) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def inputs_first(loss: Tensor, x: Tensor, _stage: nn.Module) -> None:
    (x.grad,) = torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()


BACKWARDS: list[Callable[[Tensor, Tensor, nn.Module], None]] = [halves, twice, inputs_first]


@pytest.fixture(scope="module")
def profile() -> Profile:
    x = torch.randn(SHAPE, requires_grad=True)
    return recollect.record(
        model(), x, loss_fn=torch.sum, gradients="accumulated", holds_output=False, split_backward=True
    )


def plan_of(profile: Profile, name: str) -> recollect.Plan:
    if name == "every_nth":
        return recollect.classic_plan(profile, "every_nth", 2)
    return recollect.plan(profile, "85%") if name == "planned" else recollect.classic_plan(profile, name)  # type: ignore[arg-type]


class Step:
    """A step of the model under a plan, with gradients there from the beginning."""

    def __init__(self, plan: recollect.Plan, backward: Callable[[Tensor, Tensor, nn.Module], None]) -> None:
        self.model = model()
        recollect.apply(self.model, plan)
        self.backward = backward
        self.x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).requires_grad_()
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def run(self) -> list[Tensor | None]:
        torch.manual_seed(7)
        self.x.grad = None
        self.backward(self.model(self.x).sum(), self.x, self.model)
        return [self.x.grad, *(parameter.grad for parameter in self.model.parameters())]


@pytest.mark.parametrize("name", ["full", "every_nth", "planned"])
@pytest.mark.parametrize("backward", BACKWARDS)
def test_gradients_are_equal(
    profile: Profile, name: str, backward: Callable[[Tensor, Tensor, nn.Module], None]
) -> None:
    expected = Step(recollect.Plan({}), backward).run()
    found = Step(plan_of(profile, name), backward).run()
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("name", ["full", "every_nth", "planned"])
def test_peaks_are_as_predicted(profile: Profile, name: str) -> None:
    assert {event[0] for event in profile.log.events} >= {PEEK, LET_GO}
    plan = plan_of(profile, name)
    step = Step(plan, halves)
    step.run()
    peak_bytes = recollect.measure_peak(step.run).peak_bytes
    assert plan.predicted_peak_bytes is not None
    assert peak_bytes <= plan.predicted_peak_bytes <= peak_bytes + ROOM


@pytest.mark.parametrize("budget", ["65%", "80%"])
def test_a_formula_holds_what_it_asked_for_while_it_runs(budget: str) -> None:
    trained, x = nn.Sequential(*(Block(32) for _ in range(4))), torch.randn(512, 32)

    def step() -> None:
        loss = trained(x).square().mean()
        loss.backward(retain_graph=True)
        (loss * loss).backward()
        trained.zero_grad()

    profile = recollect.record(trained, step=step)
    assert {event[0] for event in profile.log.events} >= {PEEK, GIVE_BACK}
    plan = recollect.plan(profile, budget)
    recollect.apply(trained, plan)
    step()
    peak_bytes = recollect.measure_peak(step).peak_bytes
    assert plan.predicted_peak_bytes is not None
    assert peak_bytes <= plan.predicted_peak_bytes <= peak_bytes + ROOM


def test_what_the_first_half_computed_again_is_gone_after_it(profile: Profile) -> None:
    def kept_bytes(plan: recollect.Plan) -> int:
        step = Step(plan, halves)
        step.run()
        loss = step.model(step.x).sum()
        torch.autograd.grad(loss, step.x, retain_graph=True)
        held = recollect.measure_peak(loss.detach_).peak_bytes
        del loss
        return held

    assert kept_bytes(recollect.classic_plan(profile, "full")) < kept_bytes(recollect.Plan({})) - 4 * 64 * 128 * 4


def test_a_backward_that_fails_leaves_nothing_behind(profile: Profile) -> None:
    step = Step(recollect.classic_plan(profile, "full"), halves)
    loss = step.model(step.x).sum()

    def fail(_gradient: Tensor) -> None:
        raise ValueError("half way")

    step.x.register_hook(fail)
    with pytest.raises(ValueError, match="half way"):
        torch.autograd.grad(loss, step.x, retain_graph=True)
    (applied,) = applied_to(step.model)
    tapes: set[Tape] = {forward.tape for forward in applied._forwards if isinstance(forward, UnitForward)}
    assert tapes and not any(passed() for tape in tapes for passed in tape._passes.values())
