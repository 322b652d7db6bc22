"""Work on several CUDA streams: recompute reads nothing before it is there, and frees nothing that is still read.

The CPU has no streams. There the same models run without, so that only what is about streams is left for a GPU to show.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from device_models import decoder
from device_steps import FULL_ONLY, PLANS, RecordProperty, check_plans, sized
from function_units import UNITS, Unit, two_units
from gradients import Step, clear, collect, gradients


@contextmanager
def forked(device: torch.device) -> Iterator[None]:
    """Run the block on a new stream, which waits for the current one before, and is waited for after."""
    if device.type != "cuda":
        yield
        return
    main, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        yield
    main.wait_stream(side)


def used_here_too(tensor: Tensor) -> Tensor:
    """Tell the allocator that the current stream reads a tensor of another one."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


def forks(unit: Unit, hidden: Tensor) -> Tensor:
    """Half of the work on a side stream, as branches of a layer and overlapped communication do it."""
    with forked(hidden.device):
        left = (used_here_too(hidden).sin() @ unit.weight).exp()
    right = (hidden.cos() @ unit.weight).sigmoid()
    return used_here_too(left) * right


def forks_without_a_record(unit: Unit, hidden: Tensor) -> Tensor:
    """Both branches wait for each other, so that plain autograd needs no `record_stream`."""
    with forked(hidden.device):
        left = (hidden.sin() @ unit.weight).exp()
    return left * (hidden.cos() @ unit.weight).sigmoid()


def forks_twice(unit: Unit, hidden: Tensor) -> Tensor:
    """What one side stream made is read on another one."""
    with forked(hidden.device):
        left = hidden.sin().exp()
    with forked(hidden.device):
        right = (left.cos() @ unit.weight).sigmoid()
    return left.tanh() * right


@pytest.mark.parametrize("function", [forks, forks_without_a_record, forks_twice])
def test_branches_on_a_side_stream(function: Any, device: torch.device, record_property: RecordProperty) -> None:
    model, data = two_units(function, device)
    check_plans(model, UNITS, lambda: gradients(model, data), record_property)


class LateGradient(torch.autograd.Function):
    """Passes its argument on; its backward keeps the stream busy before it passes the gradient on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if gradient.is_cuda:
            busy = torch.ones(4096, 4096, device=gradient.device)
            for _ in range(20):  # some 50 ms of matrix products
                busy = busy @ busy
                busy = busy.sigmoid()
        return gradient.clone()


def two_readers(unit: Unit, hidden: Tensor) -> Tensor:
    """One value, dropped, is saved on both streams; in backward the side stream wants it first, and is late to make it."""
    shared = hidden.sin()
    right = shared.square()
    with forked(hidden.device):
        left = LateGradient.apply(used_here_too(shared).cos())
    return left + right


def test_a_value_that_two_streams_saved(device: torch.device, record_property: RecordProperty) -> None:
    """What one stream computes again for its own backward is not there yet when the other one reads it, unless that waits."""
    model, data = two_units(two_readers, device)
    check_plans(model, UNITS, lambda: gradients(model, data), record_property, PLANS)


def late_reader(unit: Unit, hidden: Tensor) -> Tensor:
    """A value is kept on the side stream, and read on the main one in backward to make another one again."""
    with forked(hidden.device):
        left = (hidden @ unit.weight).exp()
    return (left * 2).sin() * hidden


def test_memory_of_a_side_stream_is_not_given_away(device: torch.device, record_property: RecordProperty) -> None:
    """Blocks are reused at once on the stream that they were made on; more steps, so that there is something to reuse."""
    model, data = two_units(late_reader, device)

    def step() -> Step:
        for _ in range(sized(device, 1, 10)):
            found = gradients(model, data)
        return found

    check_plans(model, UNITS, step, record_property)


@pytest.mark.parametrize("where", ["everything", "backward"])
def test_step_of_a_user_on_a_side_stream(where: str, device: torch.device, record_property: RecordProperty) -> None:
    case = decoder("llama", device)
    model, batch = case.model(), case.data()

    def step() -> Step:
        clear(model, batch)
        if where == "everything":
            with forked(device):
                loss = model(**batch).loss
                loss.backward()
        else:
            loss = model(**batch).loss
            with forked(device):
                loss.backward()
        return collect(model, batch, loss)

    check_plans(model, case.layers, step, record_property, {**FULL_ONLY, "random-1": PLANS["random-1"]})
