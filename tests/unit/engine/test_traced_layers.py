"""Layers whose code is no plain sequence of ops still run from traces, with the bits of eager mode."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import recollect
from recollect.engine.facts import facts_of
from recollect.engine.graph.graph_engine import GraphForward
from recollect.engine.graph.real_layouts import laid_out
from recollect.engine.graph.trace import FakeTensorMode

WIDTH = 8
_aten = torch.ops.aten
_logger = logging.getLogger(__name__)


class Doubled(torch.autograd.Function):
    """Twice a tensor, with another gradient than autograd's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.cos()


def constant(x: Tensor) -> Tensor:
    scale = torch.tensor([1.0, 2.0] * (WIDTH // 2))
    scale.add_(1)
    return x * scale


def number_of_a_constant(x: Tensor) -> Tensor:
    half = torch.div(WIDTH, 2, rounding_mode="trunc")
    return x.view(-1, half).softmax(-1).view(x.shape)  # type: ignore[call-overload, no-any-return]


def own_function(x: Tensor) -> Tensor:
    return Doubled.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def logs_once(x: Tensor) -> Tensor:
    _logger.say_once("slow")  # type: ignore[attr-defined]
    return x.sin()


def static_address(x: Tensor) -> Tensor:
    made = torch.zeros_like(x)
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(made)
    return made.copy_(x).sin()


def shares_of_the_largest(x: Tensor) -> Tensor:
    largest, where = x.softmax(-1).topk(2)
    largest /= largest.sum(-1, keepdim=True)
    return x + torch.zeros_like(x).scatter(-1, where, largest)


def shares_of_the_chosen(x: Tensor) -> Tensor:
    chosen = x.softmax(-1).gather(-1, x.topk(2)[1])
    chosen /= chosen.sum(-1, keepdim=True) + 1e-20
    return x * chosen.sin().sum(-1, keepdim=True)


def transposed_gradient(x: Tensor) -> Tensor:
    return F.softplus(x).transpose(0, 1).contiguous().view(x.shape)


def experts(x: Tensor) -> Tensor:
    weights = x.new_ones(2, WIDTH, WIDTH)
    ends = torch.arange(1, 3, dtype=torch.int32) * 3
    return torch._grouped_mm(x.reshape(-1, WIDTH), weights, offs=ends).view(x.shape).sin()


TRACED = [
    constant,
    number_of_a_constant,
    own_function,
    logs_once,
    static_address,
    shares_of_the_largest,
    shares_of_the_chosen,
    transposed_gradient,
    experts,
]


class Layer(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.function(self.first(x)).tanh())  # type: ignore[no-any-return]


def model_of(function: Callable[[Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Layer(function), Layer(function))


def trained(model: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 6 * WIDTH).view(2, 3, WIDTH)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [tensor for p in model.parameters() for tensor in (p, p.grad) if tensor is not None]


def trained_from_traces(function: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], list[str]]:
    """Return what training leaves, and for each layer why it does not run from a trace."""
    model = model_of(function)
    profile = recollect.record(model, torch.ones(2, 3, WIDTH), loss_fn=lambda output: output.square().mean())
    with recollect.apply(model, recollect.classic_plan(profile, "full").with_engine("graph")) as applied:
        forwards = [forward for forward in applied._forwards if isinstance(forward, GraphForward)]
        left = trained(model)
        return left, [forward.why_not or ("" if forward._has_traced else "never") for forward in forwards]


@pytest.fixture(autouse=True)
def _logs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    say_once = functools.lru_cache(lambda logger, text: logger.warning(text))
    monkeypatch.setattr(logging.Logger, "say_once", say_once, raising=False)


@pytest.mark.filterwarnings("ignore:.*batch_size:UserWarning")
@pytest.mark.parametrize("function", TRACED)
def test_layers_run_from_traces_with_the_bits_of_eager_mode(function: Callable[[Tensor], Tensor]) -> None:
    left, why_not = trained_from_traces(function)
    assert set(why_not) == {""}
    for expected, got in zip(trained(model_of(function)), left, strict=True):
        assert torch.equal(expected, got)


def forbidden(x: Tensor) -> Tensor:
    made = torch.zeros_like(x)
    torch._dynamo.mark_dynamic(made, 0)
    return x + made


def asks_for_content(x: Tensor) -> Tensor:
    return x * (x > 0).sum(-1).flatten().tolist()[0]


def branches_on_content(x: Tensor) -> Tensor:
    return x.sin() if x.sum() > 100 else x.cos()


class Unsqueezed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.mul(2).unsqueeze_(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.squeeze(1) * 2


def reshapes_in_place_in_a_function(x: Tensor) -> Tensor:
    return Unsqueezed.apply(x).squeeze(1)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.filterwarnings("ignore:.*run on the tape, exactly but")
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (forbidden, "Attempt to trace forbidden callable"),
        (asks_for_content, "what aten._local_scalar_dense.default gives back depends"),
        (branches_on_content, "Data-dependent branching"),
        (reshapes_in_place_in_a_function, "a Function in it calls aten.unsqueeze_"),
    ],
)
def test_what_cannot_be_traced_stays_on_the_tape(function: Callable[[Tensor], Tensor], reason: str) -> None:
    left, why_not = trained_from_traces(function)
    assert all(why.startswith(reason) for why in why_not)
    for expected, got in zip(trained(model_of(function)), left, strict=True):
        assert torch.equal(expected, got)


def test_an_error_of_the_layer_is_no_error_of_tracing() -> None:
    from recollect._torch_dynamo import raised_by_tracing

    with pytest.raises(ZeroDivisionError) as caught:
        _ = 1 / 0
    assert not raised_by_tracing(caught.value)


ACROSS = (2, 3, WIDTH), (3 * WIDTH, 1, 3)
ONE_IMAGE = (1, 6, 2, 2), (24, 1, 12, 6)


@pytest.mark.parametrize(
    ("func", "layouts", "more"),
    [
        (_aten.softplus_backward.default, [ACROSS, ((2, 3, WIDTH), (3 * WIDTH, WIDTH, 1))], (1.0, 20.0)),
        (_aten.view.default, [ONE_IMAGE], ((1, 6, 4),)),
    ],
)
def test_traced_results_are_laid_out_as_kernels_do(func: Any, layouts: Any, more: Any) -> None:
    real = func(*(torch.empty_strided(*layout) for layout in layouts), *more)
    with FakeTensorMode():
        args = (*(torch.empty_strided(*layout) for layout in layouts), *more)
        fake = func(*args)
        assert fake.stride() != real.stride(), "PyTorch has changed: find other arguments"
        found = laid_out(func, facts_of(func), args, {}, fake)
    assert found.stride() == real.stride()
