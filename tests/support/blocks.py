"""Small modules that tests share, with no dependency but PyTorch, so that rank processes start fast."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Computes(nn.Module):
    """Computes a function of itself and of what it is given; its parts are modules and parameters, and tensors as buffers."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if type(part) is Tensor:
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def extra_repr(self) -> str:
        """Two that compute different functions do not print alike (`recorded_once` relies on it)."""
        return f"{self.function.__qualname__}, line {self.function.__code__.co_firstlineno}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def adds_in_place(width: int) -> Computes:
    """A residual stream that is added to in place. [n, d] -> [n, d]."""
    linear = nn.Linear(width, width)
    return Computes(lambda self, hidden: hidden.add_(self.linear((hidden * 2).sin()).cos()), linear=linear)


class Block(nn.Module):
    """Residual feed-forward block with dropout. [n, d] -> [n, d]."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, hidden: Tensor) -> Tensor:
        inner = nn.functional.gelu(self.up(self.norm(hidden)))
        return hidden + nn.functional.dropout(self.down(inner), self.dropout)


class Stack(nn.Module):
    """A stem, blocks and a head. [n, d] -> [n]."""

    def __init__(self, width: int = 16, depth: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    @property
    def layers(self) -> list[str]:
        return [f"blocks.{index}" for index in range(len(self.blocks))]

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.stem(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        output: Tensor = self.head(hidden).squeeze(-1)
        return output


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def built(build: Callable[[], nn.Module]) -> Any:
    """The same random weights on every call."""
    torch.manual_seed(0)
    return build()


@contextmanager
def partitioned(modules: list[nn.Module]) -> Iterator[None]:
    """What ZeRO-3 does to each module's parameters, in one process: `p.data` is full only while the module works.

    DeepSpeed's hooks gather before forward and before backward and release after them, by assigning to `p.data`.
    """
    parameters = {id(p): p for module in modules for p in module.parameters()}
    full = {key: parameter.data.clone() for key, parameter in parameters.items()}

    def gather(module: nn.Module, *_: Any) -> None:
        for parameter in module.parameters():
            parameter.data = full[id(parameter)]

    def release(module: nn.Module, *_: Any) -> None:
        for parameter in module.parameters():
            parameter.data = torch.empty(0)

    handles = []
    for module in modules:
        handles.append(module.register_forward_pre_hook(gather))
        handles.append(module.register_forward_hook(release))
        handles.append(module.register_full_backward_pre_hook(gather))
        handles.append(module.register_full_backward_hook(release))
        release(module)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module in modules:
            gather(module)
