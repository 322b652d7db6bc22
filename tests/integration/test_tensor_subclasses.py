"""Tensor subclasses desugar before they reach the tape, which records the ops on what is inside of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

import recollect
from blocks import Computes, Stack, built
from engines import traced
from gradients import assert_same_gradients, gradients
from policies import FEW_PLANS, FULL, Policy
from predictions import LEAN_LOOP
from recollect.applying import apply_policy
from recollect.engine.content import has_same_bits
from recollect.errors import ConfigWarning, MutatedValueError


def _step(model: Stack, data: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(data).square().mean().backward()
    return {
        f"{name} {half}": getattr(parameter.grad, half).clone()
        for name, parameter in model.named_parameters()
        for half in ("a", "b")
    }


@pytest.mark.parametrize("policy", FEW_PLANS.values(), ids=FEW_PLANS)
def test_wrapper_of_two_tensors(policy: Policy) -> None:
    model: Stack = built(Stack)
    data = TwoTensor(torch.randn(4, 16), torch.randn(4, 16))
    expected = _step(model, data)
    with apply_policy(model, model.layers, policy):
        assert_same_gradients(expected, _step(model, data))


def test_other_subclasses_than_dtensor_stay_on_the_tape() -> None:
    model: Stack = built(Stack)
    data = TwoTensor(torch.randn(4, 16), torch.randn(4, 16))
    expected = [_step(model, data) for _ in range(3)][-1]
    with traced(model, model.layers, FULL), pytest.warns(ConfigWarning, match="it reads a TwoTensor"):
        assert_same_gradients(expected, [_step(model, data) for _ in range(3)][-1])


class Opaque(torch.Tensor):
    """Wraps a tensor without telling which: it has no `__tensor_flatten__`, and no storage."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Opaque:
        made: Any = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        made.inner = inner
        return made

    def __init__(self, inner: Tensor) -> None: ...

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, lambda wrapped: wrapped.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, func(*args, **kwargs))


def waves() -> Computes:
    """[n, d] -> [n, d], for tensors of any type."""
    return Computes(lambda _, hidden: hidden.sin().exp())


def _gradient_of_opaque(model: nn.Module) -> Tensor:
    torch.manual_seed(1)
    data = Opaque(torch.randn(4, 3)).requires_grad_()
    model(data).sum().backward()
    assert isinstance(data.grad, Opaque)
    return data.grad.inner


@pytest.mark.parametrize("policy", FEW_PLANS.values(), ids=FEW_PLANS)
def test_subclass_that_cannot_be_taken_apart_is_kept(policy: Policy) -> None:
    model = nn.Sequential(waves(), waves())
    expected = _gradient_of_opaque(model)
    with apply_policy(model, ["0", "1"], policy):
        assert torch.equal(_gradient_of_opaque(model), expected)


def test_write_to_a_subclass_that_cannot_be_taken_apart() -> None:
    model = nn.Sequential(waves())
    data = Opaque(torch.randn(4, 3)).requires_grad_()
    with apply_policy(model, ["0"], FULL):
        hidden = data * 1
        output = model(hidden).sum()
        with torch.no_grad():
            hidden.add_(1)
        with pytest.raises(MutatedValueError, match=r"saved for backward in 0, was changed in place 1 time"):
            output.backward()


def test_step_on_a_subclass_that_cannot_be_taken_apart_is_recorded() -> None:
    model = nn.Sequential(waves(), waves())
    data = Opaque(torch.randn(4, 3)).requires_grad_()
    profile = recollect.record(model, data, loss_fn=lambda output: output.sum(), units=["0", "1"], **LEAN_LOOP)
    assert [call.path for call in profile.calls] == ["0", "1"]


def jagged_layers(number: int) -> Any:
    """They work on rows of different lengths. [20, 8] -> [20, 8]."""

    def run(self: Any, hidden: Tensor) -> Tensor:
        rows = torch.nested.nested_tensor_from_jagged(hidden, torch.tensor([0, 3, 10, 20]))
        return hidden + nn.functional.gelu(self.linear(self.norm(rows))).values()

    def layer() -> Computes:
        return Computes(run, norm=nn.LayerNorm(8), linear=nn.Linear(8, 8))

    return built(lambda: nn.Sequential(*(layer() for _ in range(number))))


def square_sum(output: Tensor) -> Tensor:
    return output.square().sum()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("policy", FEW_PLANS.values(), ids=FEW_PLANS)
def test_nested_tensors(policy: Policy) -> None:
    """Two of them fit together only if they have the very same tensor of offsets."""
    model = jagged_layers(2)
    data = torch.randn(20, 8)
    expected = gradients(model, data, square_sum)
    with apply_policy(model, ["0", "1"], policy):
        assert_same_gradients(expected, gradients(model, data, square_sum))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_step_with_nested_tensors_is_recorded_and_planned() -> None:
    model = jagged_layers(3)
    data = torch.randn(20, 8)
    profile = recollect.record(model, data, loss_fn=square_sum, **LEAN_LOOP)
    plan = recollect.classic_plan(profile, "full")
    assert recollect.verify(model, data, plan, loss_fn=square_sum, time=False).equal


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_no_host_memory_is_planned_for_nested_tensors() -> None:
    """The tape holds them itself, as they have no layout by which it would know them again."""

    def run(self: Any, hidden: Tensor) -> Tensor:
        rows = torch.nested.as_nested_tensor(list(hidden.split([3, 17])))
        return torch.cat(list(self.linear(rows).unbind())).exp()

    model = nn.Sequential(*(Computes(run, linear=nn.Linear(8, 8)) for _ in range(2)))
    profile = recollect.record(model, torch.randn(20, 8), loss_fn=square_sum, units=["0", "1"])
    assert {value.name for value in profile.graphs[0].values if value.stays} == {
        "_nested_tensor_from_tensor_list",
        "linear.linear",
    }


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("engine", ["tape", "graph"])
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_a_loop_on_nested_tensors_is_planned(layout: torch.layout, engine: Any) -> None:
    """Sizes of jagged ones cannot be compared, and others have none; a step with longer rows is a larger one."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = copy.deepcopy(model)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    said: list[str] = []
    attached = recollect.attach(model, optimizer, "1GiB", engine=engine, log=said.append)
    for longest in (5, 3, 9):
        rows = torch.nested.nested_tensor([torch.randn(rows, 8) for rows in (4, longest)], layout=layout)
        for one, its in ((plain, plain_optimizer), (model, optimizer)):
            torch.cat(one(rows).unbind()).square().mean().backward()
            its.step()
            its.zero_grad()
    assert attached.recorded_steps == [0, 2]
    assert ["for 2 x 72" in said[0], "for 2 x 104" in said[-1]] == [True, True]
    attached.remove()
    assert all(map(has_same_bits, model.parameters(), plain.parameters()))
