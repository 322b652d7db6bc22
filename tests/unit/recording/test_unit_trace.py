"""The memory of one run of a unit between a source and a sink, against bytes counted by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recollect.profile.variant import VariantRecord
from recollect.recording.unit_runs import trace_unit
from recollect.recording.unit_samples import UnitSample

CPU = torch.device("cpu")
ROWS, WIDTH = 4, 8
INPUT = ROWS * WIDTH * 4
WEIGHT = WIDTH * WIDTH * 4


def traced(module: nn.Module, *args: Tensor, trains: bool = True, outputs: tuple[int, ...] = (9,)) -> VariantRecord:
    """Trace a module whose arguments are the values 0, 1, ... of its unit."""
    values = tuple(range(len(args)))
    flags = tuple(trains and arg.is_floating_point() for arg in args)
    sample = UnitSample(0, module, args, {}, flags, None, input_values=values, output_values=outputs)
    return trace_unit(sample, module, CPU)


class Squares(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin().pow(2)


def test_what_is_kept_is_there_between_forward_and_backward_and_its_own() -> None:
    found = traced(Squares(), torch.ones(ROWS, WIDTH))
    # sin saves the input, pow what sin returns.
    assert (found.held, found.own_bytes, found.forward_bytes) == ((0,), INPUT, 2 * INPUT)


def test_a_stretch_of_backward_ends_where_an_input_is_let_go() -> None:
    found = traced(Squares(), torch.ones(ROWS, WIDTH))
    first, *others = found.backward
    assert first[2] == 0
    # The gradient of the output and what was kept are gone at last, and the gradient of the input is there.
    assert first[1] + sum(change for _, change, _ in others) == INPUT - INPUT - INPUT
    assert all(most >= max(0, change) for most, change, _ in found.backward)


def test_an_output_that_backward_needs_is_held_and_not_its_own() -> None:
    found = traced(nn.Sigmoid(), torch.ones(ROWS, WIDTH))
    assert (found.held, found.own_bytes, found.forward_bytes) == ((9,), 0, INPUT)
    assert [value for *_, value in found.backward] == [9, -1] or [value for *_, value in found.backward] == [9]


def test_parameters_do_not_count_and_their_gradients_do() -> None:
    found = traced(nn.Linear(WIDTH, WIDTH, bias=False), torch.ones(ROWS, WIDTH))
    assert (found.held, found.own_bytes) == ((0,), 0)
    # Those of weight and input come; that of the output goes.
    assert sum(change for _, change, _ in found.backward) == WEIGHT


def test_an_input_that_needs_no_gradient_is_held_as_well() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return x * scale

    sample_of = (torch.ones(ROWS, WIDTH), torch.full((WIDTH,), 2.0))
    sample = UnitSample(0, Scaled(), sample_of, {}, (True, False), None, input_values=(0, 3), output_values=(9,))
    assert trace_unit(sample, Scaled(), CPU).held == (3,)


def test_what_is_no_value_of_the_unit_is_neither_held_nor_its_own() -> None:
    sample = UnitSample(0, Squares(), (torch.ones(ROWS, WIDTH),), {}, (True,), None, (-1,), (9,))
    found = trace_unit(sample, Squares(), CPU)
    assert (found.held, found.own_bytes) == ((), INPUT)
    assert all(value == -1 for *_, value in found.backward)


def test_a_unit_without_gradients_of_inputs_ends_with_backward() -> None:
    found = traced(nn.Linear(WIDTH, WIDTH, bias=False), torch.ones(ROWS, WIDTH), trains=False)
    assert sum(change for _, change, _ in found.backward) == WEIGHT - INPUT


def test_a_returned_input_counts_once() -> None:
    class Passes(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x.sin()

    found = traced(Passes(), torch.ones(ROWS, WIDTH), outputs=(0, 9))
    assert (found.held, found.own_bytes, found.forward_bytes) == ((0,), 0, INPUT)


def test_errors_of_the_unit_pass() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        traced(Fails(), torch.ones(ROWS, WIDTH))


def test_a_copy_runs_by_itself_where_functions_stand_for_forwards() -> None:
    """As torchtitan's `parallelize` puts them there."""
    unit = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU())

    def around(module: Any) -> Callable[..., Any]:
        inner = module.forward

        def outer(x: Tensor, *, depth: int = 1) -> Any:
            return inner(x) if depth == 0 else outer(x * module.weight.size(0), depth=depth - 1)

        return outer

    for _ in range(2):
        unit[0].forward = around(unit[0])
    copied: Any = UnitSample(0, unit, (), {}, (), None).copied_module()
    x = torch.ones(ROWS, WIDTH)
    assert torch.equal(copied(x), unit(x))
    copied(x).sum().backward()
    assert unit[0].weight.grad is None and copied[0].weight.grad is not None
