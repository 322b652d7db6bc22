"""Units that run again as a whole: each runs a function of itself, and holds what such functions may change."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import recollect
from gradients import Step, assert_same_gradients
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan

WIDTH = 40
REGION = Plan({"0": UnitPlan({}, engine="region"), "1": UnitPlan({}, engine="region")})


class Unit(nn.Module):
    """Runs a function of itself and what it is given, [8, 40] -> [8, 40]."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("large", torch.ones(500, WIDTH))
        self.shared = nn.Dropout(0.5)
        self.history: Any = {"seen": [1.0], "deep": ([2.0], deque([1.0]))}
        self.own_random = random.Random(3)
        self.own_numpy = np.random.default_rng(3)
        self.own_torch = torch.Generator().manual_seed(3)
        self.table = torch.ones(WIDTH)
        self.large_table = torch.ones(500, WIDTH)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.function(self, hidden, *args, **kwargs)


def plain(unit: Any, hidden: Tensor) -> Tensor:
    return hidden + unit.second(unit.first(hidden).tanh()).sin()


def model_of(function: Callable[..., Tensor] = plain) -> nn.Sequential:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    return nn.Sequential(Unit(function), Unit(function))


def data() -> Tensor:
    return torch.linspace(-1, 1, 8 * WIDTH, dtype=torch.float32).view(8, WIDTH)


def after(model: nn.Module, leaves: dict[str, Tensor] | None = None) -> Step:
    """Gradients, parameters, buffers, and what a unit counts."""
    found = {f"gradient of {name}": p.grad for name, p in (leaves or dict(model.named_parameters())).items()}
    found |= {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for index, unit in enumerate(model.children()):
        counted = [*unit.history["seen"], *unit.history["deep"][0], *unit.history["deep"][1]]
        found[f"history {index}"] = torch.tensor([*counted, unit.own_random.random(), unit.own_numpy.random()])
        found[f"draw {index}"] = torch.rand(3, generator=unit.own_torch)
        found[f"tables {index}"] = torch.stack([unit.table.detach(), unit.large_table.mean(0)])
    found["draws"] = torch.tensor([random.random(), np.random.rand(), float(torch.rand(1))])
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def assert_as_without_plan(step: Callable[[nn.Module], Step], function: Callable[..., Tensor] = plain) -> None:
    expected = step(model_of(function))
    model = model_of(function)
    with recollect.apply(model, REGION):
        assert_same_gradients(expected, step(model))
