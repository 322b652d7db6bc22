"""A small model that returns its loss, for loops that `attach` watches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import recollect
from recollect.attaching.attached import Attached


class Residual(nn.Module):
    """Adds three small blocks to its input, one after the other. [n, 32] -> [n, 32]."""

    def __init__(self, inner: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, inner), nn.GELU(), nn.Linear(inner, 32)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Model(Residual):
    """Its loss, always with the same weights. [n, 32] -> []."""

    def __init__(self, inner: int = 64) -> None:
        torch.manual_seed(0)
        super().__init__(inner)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


@contextmanager
def attached_loop(
    budget: int | str = "100%", model: Any = None, make: Callable[..., Any] = torch.optim.AdamW, **options: Any
) -> Iterator[tuple[Any, torch.optim.Optimizer, Attached]]:
    """A model, its optimizer, and the handle that watches both."""
    model = Model() if model is None else model
    optimizer = make(model.parameters())
    with recollect.attach(model, optimizer, budget, **{"log": lambda _: None, **options}) as attached:
        yield model, optimizer, attached


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: int = 16, **arguments: object) -> None:
    model(torch.randn(rows, 32), **arguments).backward()
    optimizer.step()
    optimizer.zero_grad()
