"""The second run of a region sees what its first run saw, whatever happens to its module and arguments."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import recollect
from gradients import Step, assert_same_gradients
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from region_units import WIDTH, after, assert_as_without_plan, data, plain

SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("SCALE", default=1.0)


# Between the two runs


def functional(model: nn.Module) -> Step:
    leaves = {name: (p * 1.5).detach().requires_grad_() for name, p in model.named_parameters()}
    others = {name: buffer + 1 for name, buffer in model.named_buffers()}
    functional_call(model, {**leaves, **others}, (data(),)).square().sum().backward()
    return after(model, leaves)


def functional_of_its_own(model: nn.Module) -> Step:
    """Tensors that are no leaves: gradients go on to the model's own parameters."""
    tensors = {name: p * 1.5 for name, p in model.named_parameters()}
    loss = functional_call(model, tensors, (data(),)).square().sum()
    del tensors
    loss.backward()
    return after(model)


def step_with(between: Callable[[Any], object]) -> Callable[[nn.Module], Step]:

    def step(model: nn.Module) -> Step:
        leaves = dict(model.named_parameters())
        loss = model(data()).square().sum()
        for unit in model.children():
            between(unit)
        loss.backward()
        return after(model, leaves)

    return step


def other_data(unit: Any) -> None:
    for parameter in unit.parameters():
        parameter.data = parameter.data * 2


def other_type(unit: Any) -> None:
    unit.to(torch.float64)


def other_submodule(unit: Any) -> None:
    unit.first = nn.Tanh()
    unit.second = nn.Identity()


def other_parameter(unit: Any) -> None:
    unit.first.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    del unit.second.bias
    unit.second.bias = None


def frozen(unit: Any) -> None:
    unit.requires_grad_(False)


def hooked(unit: Any) -> None:
    unit.first.register_forward_hook(lambda module, args, output: output * 2)
    unit.second.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def other_forward(unit: Any) -> None:
    unit.first.forward = torch.sin


def trained_copy(unit: Any) -> None:
    twin = copy.deepcopy(unit)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1)


def evaluating(unit: Any) -> None:
    unit.eval()


@pytest.mark.parametrize(
    "between",
    [other_data, other_type, other_submodule, other_parameter, frozen, hooked, other_forward]
    + [trained_copy, evaluating],
)
def test_what_happens_to_a_module_between(between: Callable[[Any], object]) -> None:
    assert_as_without_plan(step_with(between))


@pytest.mark.parametrize("step", [functional, functional_of_its_own])
def test_functional_call(step: Callable[[nn.Module], Step]) -> None:
    assert_as_without_plan(step, lambda unit, hidden: plain(unit, hidden) * unit.large.mean(0))


def test_functional_call_of_a_recurrent_network() -> None:

    def built() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.LSTM(4, 4))

    def step(model: nn.Module) -> Step:
        leaves = {name: (p * 1.5).detach().requires_grad_() for name, p in model.named_parameters()}
        functional_call(model, leaves, (torch.ones(3, 2, 4),))[0].square().sum().backward()
        return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}

    expected, model = step(built()), built()
    with recollect.apply(model, Plan({"0": UnitPlan({}, engine="region")})):
        assert_same_gradients(expected, step(model))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weight_norm_by_a_hook_that_is_removed_between() -> None:
    def step(model: nn.Module) -> Step:
        for unit in model.children():
            nn.utils.weight_norm(unit.first)
        leaves = dict(model.named_parameters())
        loss = model(data()).square().sum()
        for unit in model.children():
            nn.utils.remove_weight_norm(unit.first)
        loss.backward()
        return after(model, leaves)

    assert_as_without_plan(step)


@pytest.mark.parametrize("norm", [weight_norm, spectral_norm])
def test_parametrizations_in_a_functional_call(norm: Callable[[nn.Module], nn.Module]) -> None:
    def step(model: nn.Module) -> Step:
        for unit in model.children():
            norm(unit.first)
        return functional(model)

    assert_as_without_plan(step)


def test_hooks_that_are_removed_between_run_in_their_order() -> None:
    def step(model: nn.Module) -> Step:
        handles = []
        for unit in model.children():
            handles += [unit.first.register_forward_hook(lambda module, args, output: output + 1)]
            unit.first.register_forward_hook(lambda module, args, output: output * 2)
            handles += [unit.second.register_forward_pre_hook(lambda module, args: (args[0] * 3,))]
        loss = model(data()).square().sum()
        for handle in handles:
            handle.remove()
        loss.backward()
        return after(model)

    assert_as_without_plan(step)


# Around the first run


class Scaling(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        return output * 2 if func is torch.tanh or func is Tensor.tanh else output


@contextlib.contextmanager
def variable() -> Iterator[None]:
    token = SCALE.set(3.0)
    try:
        yield
    finally:
        SCALE.reset(token)


@contextlib.contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def reads_its_surroundings(unit: Any, hidden: Tensor) -> Tensor:
    factor = torch.ones(()) / 3
    if torch.are_deterministic_algorithms_enabled():
        factor = factor * 2
    output: Tensor = unit.first(hidden).tanh() * factor.to(hidden) * SCALE.get()
    return hidden + (output * (1 if factor.dtype is torch.float32 else 2)).sin()


AROUND: dict[str, Callable[[], Any]] = {
    "a context variable": variable,
    "default dtype": default_dtype,
    "deterministic": deterministic,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "a function mode": Scaling,
    "default device": lambda: torch.device("cpu"),
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_holds_around_one_of_them(around: Callable[[], Any], where: str) -> None:
    def step(model: nn.Module) -> Step:
        with around() if where == "forward" else contextlib.nullcontext():
            loss = model(data()).square().sum()
        with around() if where == "backward" else contextlib.nullcontext():
            loss.backward()
        return after(model)

    assert_as_without_plan(step, reads_its_surroundings)


def test_default_device_that_is_set_between() -> None:
    """It is a function mode, which steps aside for backward."""

    def step(model: nn.Module) -> Step:
        loss = model(data()).square().sum()
        torch.set_default_device("meta")
        try:
            loss.backward(torch.ones((), device="cpu"))
        finally:
            torch.set_default_device(None)
        return after(model)

    assert_as_without_plan(step, reads_its_surroundings)


# What the first run does


def draws_everywhere(unit: Any, hidden: Tensor) -> Tensor:
    factor = random.random() + np.random.rand() + unit.own_random.random() + unit.own_numpy.random()
    noise = torch.rand(WIDTH, generator=unit.own_torch)
    return unit.shared(unit.first(hidden) * factor * noise).tanh()


def nested_containers(unit: Any, hidden: Tensor) -> Tensor:
    unit.history["seen"].append(2.0)
    unit.history["deep"][0].append(len(unit.history["seen"]))
    unit.history["deep"][1].appendleft(sum(unit.history["deep"][0]))
    return unit.first(hidden).mul(unit.history["deep"][1][0]).tanh()


def tensor_attributes(unit: Any, hidden: Tensor) -> Tensor:
    output = unit.first(hidden) * unit.table.clone() * unit.large_table.mean(0)
    with torch.no_grad():
        unit.table.mul_(1.5)
        unit.large_table.data[: len(output)].add_(output)
    return (output * unit.table.clone()).tanh()


def parameters_in_place(unit: Any, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        unit.first.weight.mul_(1.1)
        unit.second.bias.add_(1)
    return plain(unit, hidden)


def parameters_through_data(unit: Any, hidden: Tensor) -> Tensor:
    unit.first.weight.data.mul_(1.1)
    unit.second.bias.data.add_(1)
    return plain(unit, hidden)


def parameters_by_assignment(unit: Any, hidden: Tensor) -> Tensor:
    unit.first.weight.data = nn.functional.normalize(unit.first.weight.data) * 1.1
    return plain(unit, hidden)


def large_buffer_through_data(unit: Any, hidden: Tensor) -> Tensor:
    output = unit.first(hidden) * unit.large.mean(0)
    unit.large.data.mul_(1.5)
    return output.tanh()


def partly_without_gradients(unit: Any, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        gate = unit.second(hidden).sigmoid()
    return hidden + unit.first(hidden).tanh() * gate


@pytest.mark.parametrize(
    "function",
    [draws_everywhere, nested_containers, tensor_attributes, parameters_in_place, parameters_through_data]
    + [parameters_by_assignment, large_buffer_through_data, partly_without_gradients],
)
@pytest.mark.parametrize("num_backward", [1, 2])
def test_what_forward_does_to_its_module(function: Callable[..., Tensor], num_backward: int) -> None:
    def step(model: nn.Module) -> Step:
        for _ in range(2):
            loss = model(data()).square().sum()
            for more in reversed(range(num_backward)):
                loss.backward(retain_graph=more > 0)
        return after(model)

    assert_as_without_plan(step, function)


class TwoGiven(nn.Sequential):
    """Passes more than one thing on to its units."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        for unit in self:
            hidden = unit(hidden, *args, **kwargs)
        return hidden


def uses_arguments(unit: Any, hidden: Tensor, seen: list[Any], *, cache: dict[str, Any]) -> Tensor:
    seen.append(hidden.detach().mean())
    keys = cache.setdefault("keys", [])
    output: Tensor = unit.first(hidden) * cache["scale"].clone() * len(keys) + sum(seen)
    keys.append(output.detach())
    with torch.no_grad():
        cache["scale"].mul_(0.5)
    return output.tanh()


def test_arguments_that_the_first_run_changes() -> None:
    def step(model: nn.Module) -> Step:
        seen: list[Any] = []
        cache: dict[str, Any] = {"scale": torch.ones(WIDTH)}
        TwoGiven(*model)(data(), seen, cache=cache).square().sum().backward()
        return after(model) | {"seen": torch.stack(seen), "keys": torch.stack(cache["keys"]), "scale": cache["scale"]}

    assert_as_without_plan(step, uses_arguments)
