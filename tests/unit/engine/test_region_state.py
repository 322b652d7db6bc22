"""A module that runs again as a whole runs as the first time, and leaves behind what one run leaves behind."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import recollect
from gradients import assert_same_gradients
from recollect.engine.draws import RegionDraws
from recollect.engine.region_state import SMALL_BYTES, _HeldTensors, small_buffer_bytes
from recollect.errors import MutatedValueError
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan

REGION = Plan({"0": UnitPlan({}, engine="region"), "1": UnitPlan({}, engine="region")})


class Unit(nn.Module):
    """Runs a function of itself and its input, [8, 16] -> [8, 16]."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.spectral = spectral_norm(nn.Linear(16, 16))
        self.register_buffer("mean", torch.ones(16))
        self.register_buffer("large", torch.ones(SMALL_BYTES // 16, 16))
        self.register_buffer("scratch", None)
        self.count = 0
        self.history: list[float] = []
        self.last: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        return self.function(self, hidden)


def batch_norm(unit: Any, hidden: Tensor) -> Tensor:
    return unit.norm(unit.linear(hidden)).tanh()


def spectral(unit: Any, hidden: Tensor) -> Tensor:
    return unit.spectral(hidden).tanh()


def average_in_place(unit: Any, hidden: Tensor) -> Tensor:
    output = unit.linear(hidden) + unit.mean.clone()
    with torch.no_grad():
        unit.mean.mul_(0.5).add_(output.mean(0))
    return output * unit.mean.clone().tanh()


def average_by_assignment(unit: Any, hidden: Tensor) -> Tensor:
    output = unit.linear(hidden) * unit.mean
    unit.mean = 0.5 * unit.mean + output.detach().mean(0)
    return output.tanh()


def large_buffer(unit: Any, hidden: Tensor) -> Tensor:
    output = unit.linear(hidden) * unit.large.mean(0)
    with torch.no_grad():
        unit.large[: len(hidden)] += output
    return output.tanh()


def counter(unit: Any, hidden: Tensor) -> Tensor:
    unit.count += 1
    return unit.linear(hidden).mul(unit.count).tanh()


def containers(unit: Any, hidden: Tensor) -> Tensor:
    unit.history.append(float(hidden.detach().mean()))
    return unit.linear(hidden).mul(len(unit.history) + sum(unit.history)).tanh()


def recurrent(unit: Any, hidden: Tensor) -> Tensor:
    output = unit.linear(hidden).tanh() * (1 if unit.last is None else unit.last.mean())
    unit.last = output.detach()
    return output


def new_attribute(unit: Any, hidden: Tensor) -> Tensor:
    is_first = not hasattr(unit, "seen")
    unit.seen = True
    return unit.linear(hidden).tanh() * (2 if is_first else 1)


def new_buffer(unit: Any, hidden: Tensor) -> Tensor:
    scale = 2 if unit.scratch is None else 1
    unit.scratch = hidden.detach()
    return unit.linear(hidden).tanh() * scale


def dropout(unit: Any, hidden: Tensor) -> Tensor:
    noise = torch.rand(16) * torch.randint(1, 4, (16,)) + torch.randperm(16)
    return nn.functional.dropout(unit.linear(hidden) * noise, 0.5).tanh()


def python_draw(unit: Any, hidden: Tensor) -> Tensor:
    return unit.linear(hidden).mul(random.random()).tanh()


def numpy_draw(unit: Any, hidden: Tensor) -> Tensor:
    return unit.linear(hidden).mul(np.random.rand()).tanh()


def training_flag(unit: Any, hidden: Tensor) -> Tensor:
    return nn.functional.dropout(unit.linear(hidden), 0.5, unit.training).tanh()


def late_write(unit: Any, hidden: Tensor) -> Tensor:
    unit.count += 1
    output = unit.linear(hidden).tanh() * unit.large.mean()
    if unit.count > 2:
        unit.large.add_(1)
    return output


FUNCTIONS = [
    batch_norm, spectral, average_in_place, average_by_assignment, large_buffer, counter, containers, recurrent,
    new_attribute, new_buffer, dropout, python_draw, numpy_draw, training_flag, late_write,
]  # fmt: skip


def model_of(function: Callable[[Any, Tensor], Tensor]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Unit(function), Unit(function))


def three_steps(model: nn.Module, **backward: Any) -> dict[str, Tensor]:
    """Gradients, buffers and attributes after three steps; the model goes into eval mode before each backward."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    for _ in range(3):
        model.train()
        loss = model(torch.randn(8, 16)).square().mean()
        model.eval()
        if backward:
            loss.backward(**backward)
        loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    for index, unit in enumerate(model.children()):
        found[f"attributes of {index}"] = torch.tensor([unit.count, len(unit.history), sum(unit.history)])
    found["generator"] = torch.get_rng_state()
    found["next draws"] = torch.tensor([random.random(), np.random.rand()])
    return found


@pytest.mark.parametrize("function", FUNCTIONS)
def test_steps_are_those_without_a_plan(function: Callable[[Any, Tensor], Tensor]) -> None:
    expected = three_steps(model_of(function))
    model = model_of(function)
    names = [sorted(vars(module)) for module in model.modules()]
    with recollect.apply(model, REGION):
        assert_same_gradients(expected, three_steps(model))
    added = {"seen"} if function is new_attribute else set()
    assert names == [sorted(set(vars(module)) - added) for module in model.modules()]


@pytest.mark.parametrize("function", [average_in_place, dropout, counter])
def test_two_backward_passes_over_one_graph(function: Callable[[Any, Tensor], Tensor]) -> None:
    expected = three_steps(model_of(function), retain_graph=True)
    model = model_of(function)
    with recollect.apply(model, REGION):
        assert_same_gradients(expected, three_steps(model, retain_graph=True))


def test_dropout_beside_a_thread_that_draws() -> None:
    over = threading.Event()

    def draw() -> None:
        while not over.is_set():
            torch.rand(3)

    def drops(unit: Any, hidden: Tensor) -> Tensor:
        return nn.functional.dropout(hidden * unit.mean, 0.5).sin()

    model = model_of(drops)
    thread = threading.Thread(target=draw)
    thread.start()
    wrong = 0
    try:
        with recollect.apply(model, REGION):
            for _ in range(300):
                hidden = torch.full((64, 16), 1.2, requires_grad=True)
                output = model[0](hidden)
                output.sum().backward()
                wrong += not torch.equal(hidden.grad == 0, output == 0)
    finally:
        over.set()
        thread.join()
    assert wrong == 0


def test_large_buffer_that_is_first_written_to_later_where_no_mode_sees_it() -> None:
    """Its content was not copied, so that the module cannot run again as the first time."""

    def late(unit: Any, hidden: Tensor) -> Tensor:
        with torch.utils._python_dispatch._disable_current_modes():
            return late_write(unit, hidden)

    model = model_of(late)
    with (
        recollect.apply(model, REGION),
        pytest.raises(MutatedValueError, match=r"\[4096, 16\], saved for backward in 1"),
    ):
        three_steps(model)


def test_small_buffers_count() -> None:
    assert small_buffer_bytes(model_of(batch_norm)[0]) == 2 * 64 + 8 + 2 * 64 + 64


@pytest.mark.parametrize("is_first", [True, False])
def test_code_that_no_mode_sees_draws_the_same(is_first: bool) -> None:
    """What a dispatch mode cannot see is drawn from the default generator, which is set back."""

    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Tensor) -> Tensor:
            with torch.utils._python_dispatch._disable_current_modes():
                mask = torch.rand(16)
            ctx.save_for_backward(mask)
            return hidden * mask

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return gradient * ctx.saved_tensors[0]

    def hides(unit: Any, hidden: Tensor) -> Tensor:
        hidden = unit.linear(hidden)
        if is_first:
            hidden = Hidden.apply(hidden).sin()
        output: Tensor = Hidden.apply(nn.functional.dropout(hidden, 0.2))
        return output.tanh()

    expected = three_steps(model_of(hides))
    model = model_of(hides)
    with recollect.apply(model, REGION):
        assert_same_gradients(expected, three_steps(model))


def test_a_second_run_copies_what_others_hold_before_it_writes_to_it() -> None:
    """One holds the buffer before the first run writes to it, another one afterwards."""
    buffer, draws = torch.zeros(4), RegionDraws()
    before, after = _HeldTensors("before"), _HeldTensors("after")
    before.hold(buffer)
    with draws.first():
        buffer.add_(1)
    after.hold(buffer)
    with draws.second():
        buffer.add_(1)
    with before.restored():
        assert buffer.tolist() == [0] * 4
    with after.restored():
        assert buffer.tolist() == [1] * 4
