"""Where the second run of a region would see something else than the first: an error, or found by `verify`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.utils.checkpoint import CheckpointError

import recollect
from recollect.errors import MutatedValueError
from region_units import REGION, WIDTH, data, model_of, plain

# What is refused


def add_in_place(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.add_(1)


def add_through_data(tensor: Tensor) -> None:
    tensor.data.add_(1)


@pytest.mark.parametrize(
    ("write", "of", "what"),
    [
        (add_in_place, lambda unit: unit.first.weight, r"\[40, 40\], saved for backward in 1\.first, .* 1 time "),
        (add_in_place, lambda unit: unit.large, r"\[500, 40\], saved for backward in 1.* 1 time "),
        (add_in_place, lambda unit: unit.large_table, r"\[500, 40\], saved for backward in 1, .* 1 time "),
        (
            add_through_data,
            lambda unit: unit.first.bias,
            r"\[40\], saved for backward in 1\.first, .*`\.data` or NumPy",
        ),
        (add_through_data, lambda unit: unit.table, r"\[40\], saved for backward in 1, .*`\.data` or NumPy"),
    ],
)
def test_writes_between_to_what_a_module_holds(write: Any, of: Any, what: str) -> None:
    model = model_of()
    with recollect.apply(model, REGION):
        model(data()).sum().backward()
        loss = model(data()).sum()
        for unit in model:
            write(of(unit))
        with pytest.raises(MutatedValueError, match=what):
            loss.backward()


def test_parametrization_that_is_registered_or_removed_between() -> None:
    model = model_of()
    with recollect.apply(model, REGION):
        loss = model(data()).sum()
        for unit in model.children():
            parametrize.register_parametrization(unit.first, "bias", nn.Identity())
        with pytest.raises(MutatedValueError, match=r"\[40\], saved for backward in 1\.first, .* 1 time "):
            loss.backward()
        loss = model(data()).sum()
        for unit in model.children():
            parametrize.remove_parametrizations(unit.first, "bias")
        with pytest.raises(MutatedValueError, match=r"\[40\], saved for backward in 1\.first\.parametrizations\.bias"):
            loss.backward()


@pytest.mark.parametrize("given", ["in a list", "by name"])
def test_writes_between_to_arguments(given: str) -> None:
    model = model_of(lambda unit, hidden, parts=(), by_name=0: plain(unit, hidden) * (sum(parts) + by_name))
    extra = torch.ones(WIDTH)
    with recollect.apply(model, REGION):
        loss = model[0](data(), [extra]) if given == "in a list" else model[0](data(), by_name=extra)
        extra.add_(1)
        with pytest.raises(MutatedValueError, match=r"\[40\], saved for backward in 0, was changed in place 1 time"):
            loss.sum().backward()


def test_a_batch_that_the_loader_refills() -> None:
    """NumPy's memory: through a mapping, as nothing counts such writes."""
    model = model_of(lambda unit, hidden, batch: plain(unit, hidden) * batch["extra"])
    array = np.ones((100_000, 1), np.float32)
    with recollect.apply(model, REGION):
        loss = model[0](torch.ones(100_000, WIDTH), {"extra": torch.from_numpy(array)}).sum()
        array[:] = 2
        with pytest.raises(MutatedValueError, match=r"\[100000, 1\], saved for backward in 0, .* `\.data` or NumPy"):
            loss.backward()


def test_write_to_the_input_is_an_error_of_pytorch() -> None:
    model = model_of()
    hidden = data()
    with recollect.apply(model, REGION):
        loss = model[0](hidden).sum()
        hidden.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_choice_of_attention_around_forward_only() -> None:
    def attends(unit: Any, hidden: Tensor) -> Tensor:
        queries = unit.first(hidden).view(1, 8, 4, 10).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(queries, queries, queries).reshape(8, WIDTH).tanh()

    model = model_of(attends)
    with recollect.apply(model, REGION):
        with sdpa_kernel(SDPBackend.MATH):
            loss = model(data()).sum()
        with pytest.raises(CheckpointError, match="different"):
            loss.backward()


# What is not put back


class Box:
    """An object of the user's, which counts, as its class does."""

    calls = 0

    def __init__(self) -> None:
        self.count = 0


def counted(unit: Any, hidden: Tensor, count: float) -> Tensor:
    return (unit.first(hidden) * count).tanh()


def class_attribute(unit: Any, hidden: Tensor) -> Tensor:
    Box.calls += 1
    return counted(unit, hidden, Box.calls)


def object_attribute(unit: Any, hidden: Tensor) -> Tensor:
    unit.box.count += 1
    return counted(unit, hidden, unit.box.count)


def iterator(unit: Any, hidden: Tensor) -> Tensor:
    return counted(unit, hidden, next(unit.numbers))


COUNTS = {"calls": 0}


def global_variable(unit: Any, hidden: Tensor) -> Tensor:
    COUNTS["calls"] += 1
    return counted(unit, hidden, COUNTS["calls"])


def closure(unit: Any, hidden: Tensor) -> Tensor:
    return unit.closed_over(unit, hidden)


def closed_over() -> Callable[[Any, Tensor], Tensor]:
    calls = 0

    def count(unit: Any, hidden: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return counted(unit, hidden, calls)

    return count


def numpy_inside(unit: Any, hidden: Tensor) -> Tensor:
    output = unit.first(hidden).tanh()
    unit.first.weight.detach().numpy()[:] *= 1.5
    return unit.second(output) * unit.first.weight.mean()


def data_between(unit: Any, hidden: Tensor) -> Tensor:
    return plain(unit, hidden)


def module_hook(unit: Any, hidden: Tensor) -> Tensor:
    return plain(unit, hidden)


local = threading.local()


def thread_local(unit: Any, hidden: Tensor) -> Tensor:
    return counted(unit, hidden, getattr(local, "scale", 1))


def unlike_the_first_time(model: nn.Sequential) -> Tensor:
    """A step in which the second run would differ, whichever of the functions above the units run; returns the loss."""
    COUNTS["calls"] = Box.calls = 0
    units: list[Any] = list(model)
    for unit in units:
        unit.box, unit.numbers, unit.closed_over = Box(), iter(range(1, 10)), closed_over()
    function, local.scale = units[0].function, 2
    with contextlib.ExitStack() as stack:
        if function is module_hook:
            hook = nn.modules.module.register_module_forward_hook(
                lambda module, args, output: output * 2 if isinstance(module, nn.Linear) else None
            )
            stack.callback(hook.remove)
        loss: Tensor = model(data()).square().sum()
    for unit in units if function is data_between else []:
        unit.second.weight.data.mul_(2)
    if function is thread_local:
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    else:
        loss.backward()
    return loss


@pytest.mark.parametrize(
    "function",
    [class_attribute, object_attribute, iterator, global_variable, closure, data_between, module_hook, thread_local],
)
def test_verify_finds_what_is_not_put_back(function: Callable[..., Tensor]) -> None:
    """Each line of rule 3 in `region_engine.py`: if one of them is put back one day, that line goes."""
    model = model_of(function)
    report = recollect.verify(model, None, REGION, step=lambda: unlike_the_first_time(model))
    assert not report.gradients_equal
    assert report.plain_difference is None


def test_verify_finds_a_write_through_numpy_inside_a_unit() -> None:
    """Silent the first time; from then on the memory counts as NumPy's, and is compared."""
    model = model_of(numpy_inside)
    with pytest.raises(MutatedValueError, match=r"\[40, 40\], saved for backward in 1\.first, .* `\.data` or NumPy"):
        recollect.verify(model, None, REGION, step=lambda: unlike_the_first_time(model))


@pytest.mark.parametrize("is_detached", [False, True])
def test_verify_compares_what_reaches_the_parameters_of_the_model(is_detached: bool) -> None:
    """Of the tensors of a functional call: those that are leaves of their own it does not see."""
    model = model_of(global_variable)

    def step() -> None:
        COUNTS["calls"] = 0
        tensors = {name: parameter * 1.5 for name, parameter in model.named_parameters()}
        if is_detached:
            tensors = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
        functional_call(model, tensors, (data(),)).square().sum().backward()

    assert recollect.verify(model, None, REGION, step=step).gradients_equal is is_detached
