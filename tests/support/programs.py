"""Random small autograd programs: a list of instructions, interpreted on tensors that share storages in every way.

An instruction takes values made earlier and appends new ones or writes into old ones. What an instruction cannot do to
the shapes it meets, it skips; the run depends on nothing but the program and the numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS, WIDTH = 4, 6
MOST_ELEMENTS = 512
MOST_AXES = 4


@dataclass(frozen=True)
class Instruction:
    """`op` on values number `a` and `b` (modulo their count); `n` is a small number that the op may use."""

    op: str
    a: int = 0
    b: int = 0
    n: int = 0


@dataclass(frozen=True)
class Program:
    """`main` becomes the layer's first result, folded to [rows, width]; `aside` is returned as it is."""

    steps: tuple[Instruction, ...]
    main: int = -1
    aside: int = -1


Values = list[Tensor]
Operation = Callable[["Machine", Tensor, Tensor, int], Any]


class Machine:
    """What the ops of one program run on."""

    def __init__(self, layer: Layer, values: Values) -> None:
        self.layer = layer
        self.values = values

    def run(self, step: Instruction) -> None:
        x, y = self.values[step.a % len(self.values)], self.values[step.b % len(self.values)]
        results = OPERATIONS[step.op](self, x, y, step.n)
        for result in results if isinstance(results, (tuple, list)) else (results,):
            is_small = isinstance(result, Tensor) and 0 < result.numel() <= MOST_ELEMENTS and result.ndim <= MOST_AXES
            if is_small and result.is_floating_point():
                self.values.append(result)


def fit(y: Tensor, x: Tensor) -> Tensor:
    """`y`, or its mean where it cannot be broadcast to `x`, in the dtype of `x`."""
    try:
        y.expand(x.shape)
    except RuntimeError:
        y = y.mean()
    return y.to(x.dtype)


def axis(x: Tensor, n: int) -> int:
    return n % x.ndim


def linear(machine: Machine, x: Tensor, y: Tensor, n: int) -> Any:
    if x.ndim == 0 or x.shape[-1] > WIDTH:
        return ()
    weight = machine.layer.weight[:, : x.shape[-1]]
    return F.linear(x, weight.to(x.dtype), machine.layer.bias.to(x.dtype) if n % 2 else None)


def gram(machine: Machine, x: Tensor, y: Tensor, n: int) -> Any:
    rows = x.reshape(-1, x.shape[-1]) if x.ndim else x.reshape(1, 1)
    return rows.t() @ rows


def attention(machine: Machine, x: Tensor, y: Tensor, n: int) -> Any:
    if x.ndim < 2:
        return ()
    x = x.reshape(1, -1, *x.shape[-2:])
    return F.scaled_dot_product_attention(x, x.cos(), x, dropout_p=0.2 * (n % 2), is_causal=n % 3 == 0)


def layer_norm(machine: Machine, x: Tensor, y: Tensor, n: int) -> Any:
    if x.ndim == 0:
        return ()
    return F.layer_norm(x, x.shape[-1:])


def batch_norm(machine: Machine, x: Tensor, y: Tensor, n: int) -> Any:
    """Updates buffers behind the schema's back."""
    if x.dtype != torch.float32 or x.numel() < 2 * WIDTH or x.numel() % WIDTH:
        return ()
    return machine.layer.norm(x.reshape(-1, WIDTH))


def write_part(machine: Machine, x: Tensor, y: Tensor, n: int) -> Any:
    if x.ndim == 0:
        return ()
    part = x.select(axis(x, n), 0)
    part.copy_(fit(y, part))


def write_by_index(machine: Machine, x: Tensor, y: Tensor, n: int) -> Any:
    if x.ndim == 0:
        return ()
    x[torch.tensor([0, x.shape[0] - 1])] = fit(y, x[:1]).mean()


def write_by_mask(machine: Machine, x: Tensor, y: Tensor, n: int) -> Any:
    x[x > 0.5] = 0.25


def fill_buffer(machine: Machine, x: Tensor, y: Tensor, n: int) -> Any:
    """A buffer made before it has content, written piece by piece."""
    if x.ndim == 0:
        return ()
    buffer = (torch.empty_like, torch.zeros_like)[n % 2](x)
    for index in range(x.shape[0]):
        buffer[index] = x[index] * (index + 1)
    return buffer


def quietly(machine: Machine, x: Tensor, y: Tensor, n: int) -> Any:
    """A write that autograd does not record, to a fresh value."""
    fresh = x * 2
    with torch.no_grad():
        fresh.add_(1)
    return fresh


def own_function(machine: Machine, x: Tensor, y: Tensor, n: int) -> Any:
    return Cube.apply(x)


class Cube(torch.autograd.Function):
    """Saves its input and its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        cube = x * x * x
        ctx.save_for_backward(x, cube)
        return cube

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, cube = ctx.saved_tensors
        return gradient * (3 * x * x + 0 * cube)


def by_axis(make: Callable[[Tensor, int], Any]) -> Operation:
    """An op that needs an axis: nothing on scalars."""
    return lambda machine, x, y, n: make(x, axis(x, n)) if x.ndim else ()


def on(make: Callable[[Tensor], Any]) -> Operation:
    return lambda machine, x, y, n: make(x)


def pair(make: Callable[[Tensor, Tensor], Any]) -> Operation:
    return lambda machine, x, y, n: make(x, fit(y, x))


COMPUTING: dict[str, Operation] = {
    "sin": on(torch.sin),
    "sigmoid": on(torch.sigmoid),
    "tanh": on(torch.tanh),
    "relu": on(torch.relu),
    "gelu": on(F.gelu),
    "silu": on(F.silu),
    "exp": on(lambda x: (-x.abs()).exp()),
    "square": on(torch.square),
    "scale": lambda machine, x, y, n: x * (0.5 + n),
    "add": pair(torch.add),
    "mul": pair(torch.mul),
    "maximum": pair(torch.maximum),
    "where": pair(lambda x, y: torch.where(x > 0, x, y)),
    "masked_fill": on(lambda x: x.masked_fill(x < 0, 0.1)),
    "clamp": on(lambda x: x.clamp(-0.5, 0.5)),
    "linear": linear,
    "gram": gram,
    "attention": attention,
    "softmax": by_axis(torch.softmax),
    "log_softmax": by_axis(torch.log_softmax),
    "cumsum": by_axis(torch.cumsum),
    "sum": by_axis(torch.sum),
    "logsumexp": by_axis(torch.logsumexp),
    "amax": by_axis(torch.amax),
    "layer_norm": layer_norm,
    "batch_norm": batch_norm,
    "cat": by_axis(lambda x, i: torch.cat([x, x.sin()], i)),
    "stack": pair(lambda x, y: torch.stack([x, y.expand(x.shape)])),
    "roll": by_axis(lambda x, i: x.roll(1, i)),
    "index_select": by_axis(lambda x, i: x.index_select(i, torch.tensor([0, 0]))),
    "contiguous": on(lambda x: x.contiguous()),
    "clone": on(torch.clone),
    "double": on(lambda x: x.double()),
    "half": on(lambda x: x.bfloat16()),
    "own_function": own_function,
    "fill_buffer": fill_buffer,
    "quietly": quietly,
}
SEVERAL_RESULTS: dict[str, Operation] = {
    "split": by_axis(lambda x, i: x.split(1 + x.shape[i] // 2, i)),
    "chunk": by_axis(lambda x, i: x.chunk(2, i)),
    "unbind": by_axis(lambda x, i: x.unbind(i)),
    "topk": by_axis(lambda x, i: x.topk(1, i)),
    "sort": by_axis(lambda x, i: torch.sort(x, stable=True, dim=i)),
    "max": by_axis(lambda x, i: x.max(i)),
    "gather": by_axis(lambda x, i: x.gather(i, x.argsort(i))),
    "var_mean": by_axis(lambda x, i: torch.var_mean(x, i, correction=0)),
}
RANDOM: dict[str, Operation] = {
    "dropout": on(lambda x: F.dropout(x, 0.3)),
    "noise": on(lambda x: x + torch.randn_like(x)),
    "bernoulli": on(lambda x: x * torch.bernoulli(torch.full_like(x, 0.5))),
    "dropout_": on(lambda x: F.dropout(x, 0.3, inplace=True)),
}
VIEWS: dict[str, Operation] = {
    "transpose": by_axis(lambda x, i: x.transpose(i, -1)),
    "slice": by_axis(lambda x, i: x.narrow(i, x.shape[i] // 2, x.shape[i] - x.shape[i] // 2)),
    "stride": on(lambda x: x[::2] if x.ndim else ()),
    "select": by_axis(lambda x, i: x.select(i, -1)),
    "expand": on(lambda x: x.unsqueeze(0).expand(2, *x.shape)),
    "unsqueeze": on(lambda x: x.unsqueeze(-1)),
    "squeeze": on(torch.squeeze),
    "reshape": on(lambda x: x.reshape(-1)),
    "pairs": on(lambda x: x.reshape(-1, 2) if x.numel() % 2 == 0 else ()),
    "diagonal": on(lambda x: x.diagonal() if x.ndim >= 2 else ()),
    "alias": on(lambda x: x.view_as(x)),
    "detach": on(torch.detach),
}
IN_PLACE: dict[str, Operation] = {
    "relu_": on(torch.relu_),
    "sigmoid_": on(torch.sigmoid_),
    "tanh_": on(torch.tanh_),
    "zero_": on(torch.zero_),
    "add_": pair(lambda x, y: x.add_(y)),
    "mul_": pair(lambda x, y: x.mul_(y)),
    "copy_": pair(lambda x, y: x.copy_(y)),
    "masked_fill_": on(lambda x: x.masked_fill_(x > 0, 0.5)),
    "write_part": write_part,
    "write_by_index": write_by_index,
    "write_by_mask": write_by_mask,
    "transpose_": on(lambda x: x.transpose_(0, -1) if x.ndim else ()),
}
FAMILIES = (COMPUTING, SEVERAL_RESULTS, RANDOM, VIEWS, IN_PLACE)
OPERATIONS = {name: operation for family in FAMILIES for name, operation in family.items()}


class Layer(nn.Module):
    """Runs a program. [rows, width] -> ([rows, width], anything)."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        machine = Machine(self, [hidden, hidden * self.bias])
        for step in self.program.steps:
            machine.run(step)
        main, aside = (machine.values[index % len(machine.values)] for index in (self.program.main, self.program.aside))
        if main.numel() == ROWS * WIDTH:
            return main.reshape(ROWS, WIDTH), aside
        return hidden * main.mean().to(hidden.dtype), aside


@dataclass(frozen=True)
class Recipe:
    """A model made of programs: which layer is called when, and what happens around the layers.

    `calls` are indices of `programs`, so a layer may be called more than once. `writes_outside`: the model writes into
    what a layer returned, outside of any layer. `trains_stem`: else no layer's input requires a gradient.
    """

    programs: tuple[Program, ...]
    calls: tuple[int, ...] = (0,)
    writes_outside: bool = False
    trains_stem: bool = True


class Chain(nn.Module):
    """[rows, width] -> scalar."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.stem = nn.Linear(WIDTH, WIDTH).requires_grad_(recipe.trains_stem)
        self.layers = nn.ModuleList(map(Layer, recipe.programs))

    @property
    def units(self) -> list[str]:
        return [f"layers.{index}" for index in range(len(self.layers))]

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.stem(hidden)
        loss = hidden.new_zeros(())
        for call in self.recipe.calls:
            hidden, aside = self.layers[call % len(self.layers)](hidden)
            loss = loss + aside.square().mean()
            hidden = hidden.float()
            if self.recipe.writes_outside:
                hidden.add_(0.5)
        return loss + hidden.sin().sum()
