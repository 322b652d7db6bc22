"""A small model that returns its loss, for loops that `attach` watches."""

import torch
from torch import Tensor, nn


class Model(nn.Module):
    """Adds three small blocks to its input, one after the other, always with the same weights. [n, 32] -> []."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()
