"""Kernels that are not PyTorch's own: Triton out of its sight, and ops registered with `torch.library`."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from device_steps import RecordProperty, check_plans
from function_units import UNITS, Unit, two_units
from gradients import gradients
from library_ops import double_, drop, half_square

Function = Callable[[Unit, Tensor], Tensor]


@pytest.fixture
def kernel(cuda: torch.device) -> ModuleType:
    pytest.importorskip("triton", reason="needs Triton")
    import triton_kernels

    return triton_kernels


def _check(function: Function, device: torch.device, record_property: RecordProperty) -> None:
    model, data = two_units(function, device)
    check_plans(model, UNITS, lambda: gradients(model, data), record_property)


def test_triton_inside_of_an_autograd_function(
    kernel: ModuleType, cuda: torch.device, record_property: RecordProperty
) -> None:
    class HalfSquare(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            output = torch.empty_like(x)
            kernel.half_square_into(x, output)
            ctx.save_for_backward(x, output)
            return output

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            x, output = ctx.saved_tensors
            return gradient * (x + 1) + 0 * output

    _check(lambda unit, hidden: HalfSquare.apply(hidden.sin()).cos(), cuda, record_property)


def test_triton_that_writes_to_its_argument(
    kernel: ModuleType, cuda: torch.device, record_property: RecordProperty
) -> None:
    class HalfSquareInPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x.clone())
            ctx.mark_dirty(x)
            kernel.half_square_into(x, x)
            return x

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return gradient * (x + 1)

    _check(lambda unit, hidden: HalfSquareInPlace.apply(hidden.sin()).square(), cuda, record_property)


def test_triton_in_the_open(kernel: ModuleType, cuda: torch.device, record_property: RecordProperty) -> None:
    """Fills a buffer in the middle of forward: what is read from it cannot be made again, and is kept."""

    def gated(unit: Unit, hidden: Tensor) -> Tensor:
        x = hidden.detach().sin()
        gate = torch.empty_like(x)
        kernel.half_square_into(x, gate)
        return (hidden * gate).exp()

    _check(gated, cuda, record_property)


def test_triton_op(kernel: ModuleType, cuda: torch.device, record_property: RecordProperty) -> None:
    _check(lambda unit, hidden: kernel.half_square_by_triton(hidden.sin()).cos(), cuda, record_property)


def with_backward(unit: Unit, hidden: Tensor) -> Tensor:
    return half_square(hidden.sin()).cos()


def without_backward(unit: Unit, hidden: Tensor) -> Tensor:
    return hidden * half_square(hidden.detach().sin()).cos()


def random_with_backward(unit: Unit, hidden: Tensor) -> Tensor:
    kept, mask = drop(hidden.sin(), 0.3)
    return kept.exp() * mask.float().cos()


def random_without_backward(unit: Unit, hidden: Tensor) -> Tensor:
    kept, mask = drop(hidden.detach().sin(), 0.3)
    return hidden * kept.exp() * mask.float().cos()


def in_place(unit: Unit, hidden: Tensor) -> Tensor:
    """The op writes to what was dropped, after something was made of the content from before."""
    scale = hidden.detach().sin()
    before = scale.cos()
    double_(scale)
    return hidden * before * scale


OPS = (with_backward, without_backward, random_with_backward, random_without_backward, in_place)


@pytest.mark.parametrize("function", OPS)
def test_custom_ops(function: Function, device: torch.device, record_property: RecordProperty) -> None:
    _check(function, device, record_property)
