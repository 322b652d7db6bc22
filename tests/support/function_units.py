"""A model of two units, each of them a matrix product and any function."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from device_steps import sized

Function = Callable[[Any, Tensor], Tensor]

UNITS = ("units.0", "units.1")


class Unit(nn.Module):
    """A function of (unit, hidden), which may use the unit's weight and modules. [n, t, d] -> [n, t, d]."""

    def __init__(self, function: Function, width: int, **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.function(self, hidden @ self.weight)


class TwoUnits(nn.Module):
    """A stem, the function twice, and a mean. [n, t, d] -> scalar."""

    def __init__(self, function: Function, width: int, **modules: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.units = nn.ModuleList([Unit(function, width, **modules) for _ in UNITS])

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.stem(hidden)
        for unit in self.units:
            hidden = unit(hidden).sin()
        return hidden.float().square().mean()


def two_units(
    function: Function, device: torch.device, dtype: torch.dtype = torch.float32, **modules: nn.Module
) -> tuple[TwoUnits, Tensor]:
    """Return the model and its input, the same on every call."""
    tokens, width = sized(device, (8, 32), (256, 256))
    torch.manual_seed(0)
    model = TwoUnits(function, width, **modules)
    data = torch.randn(2, tokens, width)
    return model.to(device, dtype), data.to(device, dtype)
