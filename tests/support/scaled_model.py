"""A model that does what a test tells it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

ROWS = torch.ones(3, 2)


class Scaled(nn.Module):
    """Does what it is told with its arguments; has a parameter, a buffer and dropout. -> whatever `function` returns."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)
