"""The registry of units that the contracts run: what layers do, each in a few lines, with how its model calls it.

A unit is a function of (unit, hidden, ...) that uses the unit's parts; hidden states are [4, 8]. `WHY_NOT` is what the graph
engine says of those that stay on the tape.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from library_ops import SCALE, double_, drop, half_square, scaled_sine, sines

WIDTH, ROWS = 8, 4

Function = Callable[..., Any]
Parts = Callable[[], dict[str, nn.Module]]


@dataclass(frozen=True)
class Case:
    """One unit, and the model around it.

    Attributes:
        name: of the unit.
        function: what the unit computes.
        parts: modules of its own.
        calls: how the model calls its units, given the list of them and a hidden state; gives back one tensor or several.
        num_units: how many the model has.
        prepare: what happens to the model before it trains: hooks, ties, dtypes.
        around: the context of each forward.
        dtype: of the model and its input.
        is_alone: plain autograd refuses a second forward before the first backward.
        is_composite: its backward has an op that runs others, in which autocast has no effect under dispatch modes.
    """

    name: str
    function: Function
    parts: Parts = dict
    calls: Callable[[Any, Tensor], Any] = lambda units, hidden: units[0](hidden)
    num_units: int = 1
    prepare: Callable[[Any], object] = lambda model: None
    around: Callable[[], Any] = nullcontext
    dtype: torch.dtype = torch.float32
    is_alone: bool = False
    is_composite: bool = False

    def model(self) -> Model:
        SCALE[0] = 1.0
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        model = Model(self).to(self.dtype)
        self.prepare(model)
        return model.train()

    def __reduce__(self) -> tuple[Any, ...]:
        return case_named, (self.name,)


class Unit(nn.Module):
    """Runs a function of itself and what it is given."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.register_buffer("seen", torch.ones(WIDTH))
        self.count = 0
        self.losses: list[Tensor] = []
        for name, part in case.parts().items():
            self.add_module(name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.case.function(self, *args, **kwargs)


class Model(nn.Module):
    """A stem, units, and a mean of squares of what they give back. [4, 8] -> scalars."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.units = nn.ModuleList(Unit(case) for _ in range(case.num_units))
        self.case = case

    @property
    def paths(self) -> list[str]:
        return [f"units.{index}" for index in range(len(self.units))]

    def forward(self, hidden: Tensor) -> list[Tensor]:
        with self.case.around():
            output = self.case.calls(self.units, self.stem(hidden))
        outputs = list(output) if isinstance(output, (list, tuple)) else [output]
        losses = [one for unit in self.units for one in unit.losses]
        for unit in self.units:
            unit.losses.clear()
        return [one.abs().float().square().mean() for one in [*outputs, *losses]]


UNITS: dict[str, Case] = {}


def case_named(name: str) -> Case:
    return UNITS[name]


def units(functions: dict[str, Function], **how: Any) -> None:
    """Enter functions in the registry; `how` is the same for all of them."""
    assert not UNITS.keys() & functions.keys()
    UNITS.update((name, Case(name, function, **how)) for name, function in functions.items())


def modules(makers: dict[str, Callable[[], nn.Module]], function: Function, **how: Any) -> None:
    """Enter modules, which the function runs as the unit's `inner`."""
    for name, make in makers.items():
        units({name: function}, parts=partial(_parts, make), **how)


def _parts(make: Callable[[], nn.Module]) -> dict[str, nn.Module]:
    return {"inner": make()}


# Ops, one after the other, and modules of PyTorch


def _conjugate(self: Any, x: Tensor) -> Tensor:
    """A conjugate has the same storage, layout and version as the original, and other numbers."""
    number = torch.view_as_complex(self.first(x).reshape(4, -1, 2)) * 2
    return torch.view_as_real(number.conj().exp() + number * number.conj()).flatten(1)


def _negative_view(self: Any, x: Tensor) -> Tensor:
    doubled = self.first(x) * 2
    return torch._neg_view(doubled).exp() * doubled.sin()


def _foreach(self: Any, x: Tensor) -> Tensor:
    rows = list(torch._foreach_mul([row.clone() for row in self.first(x)], 2.0))
    torch._foreach_add_(rows, [row.detach() for row in rows])
    return torch.stack(rows).sin()


@torch.no_grad()
def _without_gradient(x: Tensor) -> Tensor:
    return x.sin().exp()


def _sdpa(self: Any, x: Tensor, mask: Tensor | None = None, **how: Any) -> Tensor:
    heads = [one.view(1, 2, 4, 4) for one in (self.first(x), x, self.second(x))]
    return F.scaled_dot_product_attention(*heads, mask, **how).reshape(4, 8)


def _rotary(self: Any, x: Tensor) -> Tensor:
    """As complex multiplication, the way Llama's first code did it."""
    turned = torch.view_as_complex(self.first(x).reshape(4, -1, 2)) * torch.polar(torch.ones(4), torch.arange(4.0))
    return torch.view_as_real(turned).flatten(1).cos()


units(
    {
        "feed forward": lambda self, x: x + self.second(F.gelu(self.first(x))),
        "causal sdpa": lambda self, x: _sdpa(self, x, is_causal=True),
        "masked sdpa": lambda self, x: _sdpa(self, x, torch.ones(4, 4).tril().bool()),
        "split and cat": lambda self, x: (
            torch.cat(self.first(x).sin().split([3, 5], 1)[::-1], 1) + torch.cat(x.exp().chunk(4))
        ),
        "gather and scatter": lambda self, x: x.gather(1, x.argsort(1)).scatter_add(1, x.argsort(0), self.first(x)),
        "index put": lambda self, x: (
            self.first(x).index_put((torch.tensor([1, 3]),), x[:2].sin(), accumulate=True).cos()
        ),
        "topk": lambda self, x: self.first(x).topk(3).values.exp().sum(1, True) + x,
        "cumsum": lambda self, x: self.first(x).sin().cumsum(0).exp(),
        "product": lambda self, x: self.first(x).prod(1, keepdim=True) * x,
        "cumulative product": lambda self, x: self.first(x).cumprod(1),
        # The gradients of those that are not the largest are zeros with a sign.
        "largest of all": lambda self, x: x - self.first(x).max().sin() * x.exp(),
        "median of all": lambda self, x: x - self.first(x).nanmedian() * x.exp() - self.second(x).median(),
        "filled with a number that learns": lambda self, x: self.first(x).masked_fill(x > 0, self.weight[0, 0]).sin(),
        "filled with a number": lambda self, x: self.first(x).masked_fill(x > 0, torch.tensor(-2.0)).sin(),
        "cross entropy": lambda self, x: x + F.cross_entropy(self.first(x), torch.tensor([1, 2, -100, 7])),
        "fourier": lambda self, x: (torch.fft.rfft(self.first(x)).abs() @ self.weight[:5]).sin(),
        "one hot": lambda self, x: F.one_hot(self.first(x).argmax(-1), 8).float() @ self.weight + x,
        "views": lambda self, x: self.first(x).t().unsqueeze(0).expand(2, 8, 4)[1, ::1].flip(0).roll(1, 0).t().exp(),
        "pad and unfold": lambda self, x: F.pad(self.first(x), (1, 1)).unfold(1, 3, 1).exp().mean(-1),
        "gumbel softmax": lambda self, x: F.gumbel_softmax(self.first(x), hard=True) * x,
        "custom op": lambda self, x: half_square(self.first(x)).sin(),
        "custom op that draws": lambda self, x: self.first(x).sin() * drop(x.detach(), 0.5)[0],
        "without gradient inside": lambda self, x: self.first(x) * _without_gradient(x),
        "other dtype view": lambda self, x: (self.first(x) * (x.detach().view(torch.int32) & 1).float()).exp(),
        "one element": lambda self, x: self.first(x) * (1 + x.detach().abs().max().item()),
        "mask of data": lambda self, x: self.first(x)[x > 0].exp().sum() + x,
        "rotary": _rotary,
        "conjugate": _conjugate,
        "negative view": _negative_view,
        "foreach": _foreach,
    }
)


def _with_a_constant(self: Any, x: Tensor) -> Tensor:
    scale = torch.tensor([1.0, 2.0] * (WIDTH // 2))
    scale.add_(1)
    return (self.first(x) * scale).tanh()


def _number_of_a_constant(self: Any, x: Tensor) -> Tensor:
    half = torch.div(WIDTH, 2, rounding_mode="trunc")
    return x + self.first(x).view(-1, half).softmax(-1).view(x.shape)


def _shares_of_the_largest(self: Any, x: Tensor) -> Tensor:
    largest, where = self.first(x).softmax(-1).topk(2)
    largest /= largest.sum(-1, keepdim=True)
    return x + torch.zeros_like(x).scatter(-1, where, largest)


def _shares_of_the_chosen(self: Any, x: Tensor) -> Tensor:
    scores = self.first(x)
    chosen = scores.softmax(-1).gather(-1, scores.topk(2)[1])
    chosen /= chosen.sum(-1, keepdim=True) + 1e-20
    return x * chosen.sin().sum(-1, keepdim=True)


def _grouped(self: Any, x: Tensor) -> Tensor:
    ends = torch.arange(1, 3, dtype=torch.int32) * 2
    return torch._grouped_mm(self.first(x), self.weight.expand(2, -1, -1).contiguous(), offs=ends).sin()


# A gradient whose kernel lays it out as it wants to.
units({"transposed": lambda self, x: F.softplus(self.first(x)).transpose(0, 1).contiguous().view(x.shape).tanh()})
units(
    {
        "constant": _with_a_constant,
        "number of a constant": _number_of_a_constant,
        "shares of the largest": _shares_of_the_largest,
        "shares of the chosen": _shares_of_the_chosen,
        "grouped products": _grouped,
    }
)


def _inner(self: Any, x: Tensor) -> Tensor:
    return self.inner(self.first(x)).sin()


def _images(self: Any, x: Tensor) -> Tensor:
    return self.inner(self.first(x).reshape(2, 4, 2, 2)).reshape(4, -1).sin()


def _cells(self: Any, x: Tensor) -> Tensor:
    state = None
    for row in self.first(x).split(2):
        state = self.inner(row, state)
    return x + state.repeat(2, 1)


def _looked_up(self: Any, x: Tensor) -> Tensor:
    found = self.inner((x.detach()[:, :3].abs() * 3).long().clamp(max=9))
    return self.first(x) + (found if found.ndim == 2 else found.mean(1))


def _attended(self: Any, x: Tensor) -> Tensor:
    output, weights = self.inner(x, self.first(x), x, need_weights=True)
    return output * weights.mean()


def _pooled(self: Any, x: Tensor) -> Tensor:
    small, where = self.inner(self.first(x).reshape(1, 1, 4, 8))
    return F.max_unpool2d(small.sin(), where, 2).reshape(4, 8).exp()


modules(
    {
        "batch norm": lambda: nn.BatchNorm1d(8, momentum=None),
        "alpha dropout": lambda: nn.AlphaDropout(0.4),
        "random relu": nn.RReLU,
        "random relu in place": lambda: nn.RReLU(inplace=True),
        "relu in place": lambda: nn.ReLU(inplace=True),
        "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        "encoder layer": lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.1),
        "compiled part": lambda: torch.compile(nn.Linear(8, 8), backend="aot_eager"),
        "scripted part": lambda: torch.jit.trace(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.ones(4, 8)),
    },
    _inner,
)
modules(
    {
        "batch norm 2d": lambda: nn.BatchNorm2d(4),
        "batch norm without statistics": lambda: nn.BatchNorm2d(4, track_running_stats=False),
        "frozen batch norm": lambda: nn.BatchNorm2d(4).requires_grad_(False),
        "instance norm": lambda: nn.InstanceNorm2d(4, track_running_stats=True),
        "group norm": lambda: nn.GroupNorm(2, 4),
        "channel dropout": lambda: nn.Dropout2d(0.4),
        "convolution": lambda: nn.Conv2d(4, 4, 3, padding=1),
        "transposed convolution": lambda: nn.ConvTranspose2d(4, 4, 1),
    },
    _images,
)
modules(
    {"lstm": lambda: nn.LSTM(8, 8, num_layers=2, dropout=0.3), "gru": lambda: nn.GRU(8, 8)},
    lambda self, x: self.inner(self.first(x).unsqueeze(0))[0].squeeze(0),
)
modules({"gru cells": lambda: nn.GRUCell(8, 8)}, _cells)
modules(
    {
        "embedding with padding": lambda: nn.Embedding(10, 8, padding_idx=0),
        "embedding bag": lambda: nn.EmbeddingBag(10, 8, mode="max"),
    },
    _looked_up,
)
modules({"pool and unpool": lambda: nn.MaxPool2d(2, return_indices=True)}, _pooled)
modules({"attention with weights": lambda: nn.MultiheadAttention(8, 2, dropout=0.2)}, _attended)
modules(
    {"bilinear": lambda: nn.Bilinear(8, 8, 8)}, lambda self, x: self.inner(x, self.first(x).sin()), is_composite=True
)
# Their forward writes to what the one before has saved.
modules({"embedding with a maximum norm": lambda: nn.Embedding(10, 8, max_norm=0.5)}, _looked_up, is_alone=True)
modules({"spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))}, _inner, is_alone=True)

# Random numbers


def _own_generator(self: Any, x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(self.count)
    self.count += 1
    return self.first(x) * torch.rand(x.shape, generator=generator).exp()


def _seeds_of_its_own(self: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        x = F.dropout(self.first(x).sin(), 0.5)
    return F.dropout(x.cos(), 0.5)


units(
    {
        "dropout": lambda self, x: x + F.dropout(F.dropout(self.first(x).sin(), 0.3).exp(), 0.2),
        "attention dropout": lambda self, x: _sdpa(self, x, dropout_p=0.3),
        "noise": lambda self, x: self.first(x) * torch.randn_like(x) + torch.rand(8) * torch.empty(8).bernoulli_(0.5),
        "own generator": _own_generator,
        "seeds of its own": _seeds_of_its_own,
        "random of python": lambda self, x: self.first(x) * random.random(),
        "random of numpy": lambda self, x: self.first(x) * float(np.random.rand()),
        "layer drop": lambda self, x: x if random.random() < 0.3 else self.second(self.first(x).sin()),
    }
)

# Memory that is written to


def _in_place(self: Any, x: Tensor) -> Tensor:
    product = x @ self.weight
    product += self.first.bias
    return product.sigmoid_().sin() + x


def _input_written(self: Any, x: Tensor, table: Tensor | None = None) -> Tensor:
    written = x if table is None else table
    written += 1
    return self.first(x).sin() * written


def _buffer_written(self: Any, x: Tensor) -> Tensor:
    self.seen.mul_(0.9).add_(x.detach().mean(0))
    return self.first(x) + self.seen.detach().clone()


def _buffer_replaced(self: Any, x: Tensor) -> Tensor:
    self.seen = self.seen * 0.9 + x.detach().mean(0)
    return self.first(x) * self.seen


def _statistics_written(self: Any, x: Tensor) -> Tensor:
    """As batch norm does it, in sight: run twice, it would count the batch twice."""
    given = self.first(x), None, None, self.seen, self.seen, True, 0.1, 1e-5
    return torch.ops.aten._native_batch_norm_legit(*given)[0].sin()


def _statistics_read(self: Any, x: Tensor) -> Tensor:
    """Ops read them before batch norm writes to them, unseen, and gradients do afterwards."""
    x = ((self.first(x) - self.seen * 2).sin() * self.seen).exp().sin()
    return F.batch_norm(x, self.seen, self.seen, training=True).exp()


def _statistics_made(self: Any, x: Tensor) -> Tensor:
    """Batch norm writes to memory that is made in the unit, and that would be made again without it."""
    seen = self.seen * 1
    x = F.batch_norm(self.first(x), seen, seen, training=True)
    return (x * seen).exp().sin()


def layout_in_place(self: Any, x: Tensor) -> Tensor:
    """`transpose_` and its kin bump the version counter, though no number changes."""
    doubled = self.first(x) * 2
    above = doubled + 1
    doubled.transpose_(0, -1).unsqueeze_(0).squeeze_(0).t_()
    return above.sin() * doubled


def _data_assigned(self: Any, x: Tensor) -> Tensor:
    """Assigns to `.data`, which is older than `no_grad` and still in use."""
    scaled = self.first(x) * 2
    scaled.data = scaled.data.clamp(-1, 1)
    return scaled.exp()


def _data_written(self: Any, x: Tensor) -> Tensor:
    scaled = self.first(x) * 2
    scaled.data.clamp_(-1, 1)
    return scaled.exp()


def _filled_by_parts(self: Any, x: Tensor) -> Tensor:
    """A static cache: rows are written into a buffer at places that depend on the data."""
    cache = torch.zeros(6, WIDTH)
    cache.index_copy_(0, x[:, 0].argsort(), self.first(x))
    cache.scatter_add_(0, torch.ones(1, WIDTH, dtype=torch.long), x[:1].sin())
    return cache[:4].exp() + cache[2:]


def _slices_put_together(self: Any, x: Tensor) -> Tensor:
    """As Hugging Face's DeepSeek-V3 makes keys of a rotated part and another one."""
    keys = x.new_empty(4, 2, WIDTH // 2)
    keys[..., :3] = self.first(x).view(4, 2, -1)[..., :3].sin()
    keys[..., 3:] = x.view(4, 2, -1)[..., :1].exp()
    return (keys.square() * keys.tanh()).flatten(1)


def _slices_filled_out_of_sight(self: Any, x: Tensor) -> Tensor:
    """Half of a buffer, and some of it twice; what is left is filled as a foreign kernel fills it."""
    keys = torch.empty_like(x)
    keys[:, :2] = self.first(x)[:, :2].sin()
    keys[:, 1:3] = x[:, 1:3].exp()
    keys[:, 4:] = x[:, 4:].cos()
    keys.detach().numpy()[:, 3] = 2
    return keys.square()


def _resized(self: Any, x: Tensor) -> Tensor:
    buffer = torch.empty(0)
    with torch.no_grad():
        torch.mm(x, self.weight, out=buffer)
        buffer += 1
    return self.first(x) * buffer.sigmoid()


def _written_by_a_custom_op(self: Any, x: Tensor) -> Tensor:
    """Ops of `torch.library.custom_op` raise the version of what they write to before dispatch modes see them."""
    factor = (x @ self.weight).detach().sin()
    before = factor.exp()
    double_(factor)
    return self.first(x) * factor.cos() * before


def _constant_written(self: Any, x: Tensor) -> Tensor:
    factor = torch.ones(WIDTH)
    before = factor.exp()
    double_(factor)
    double_(factor[:2])
    return x * (factor * self.first(x)).sin() * before


def _added_to_itself(self: Any, x: Tensor) -> Tensor:
    output = self.first(x).sin()
    return output.add_(output)


def _numpy_inside(self: Any, x: Tensor) -> Tensor:
    scale = torch.zeros_like(x)
    scale.numpy()[...] = x.detach().numpy() + 1
    return self.first(x).sin() * scale


units(
    {
        "in place": _in_place,
        "input written": _input_written,
        "buffer written": _buffer_written,
        "buffer replaced": _buffer_replaced,
        "statistics written": _statistics_written,
        "statistics read": _statistics_read,
        "layout in place": layout_in_place,
        "statistics made": _statistics_made,
        "data assigned": _data_assigned,
        "data written": _data_written,
        "filled by parts": _filled_by_parts,
        "slices put together": _slices_put_together,
        "slices filled out of sight": _slices_filled_out_of_sight,
        # Its strides say nothing.
        "buffer without elements": lambda self, x: (
            self.first(x) * (1 + torch.empty_strided((0, 2), (0, 0)).fill_(1).sum())
        ),
        "resized": _resized,
        "written by a custom op": _written_by_a_custom_op,
        "constant written by a custom op": _constant_written,
        "numpy inside": _numpy_inside,
        "added to itself": _added_to_itself,
    }
)


def _exponential(self: Any, x: Tensor) -> Tensor:
    """Autograd saves its result alone, whatever becomes of what the model is given."""
    return (x * 0.5 + self.first.bias).exp() * 2


units({"output added to": _exponential}, calls=lambda units, x: units[0](x).add_(x))
units({"output activated in place": _exponential}, calls=lambda units, x: torch.relu_(units[0](x)) * x)


def _written_beside(self: Any, x: Tensor, table: Tensor) -> Tensor:
    scaled = [x * factor for factor in (1.5, 2.5, 3.5, 4.5)]
    table += 1
    return self.first(x * 2) + torch.stack([one.sin() for one in scaled]).sum(0)


def _at_times_itself(units: Any, x: Tensor) -> Any:
    units[0].count += 1
    return units[0](x, x.detach() if units[0].count % 3 == 0 else x.detach().clone())


units({"other input written": _input_written}, calls=lambda units, x: units[0](x, x.detach().clone()))

# Weights


def _hidden_layer(self: Any, x: Tensor) -> Tensor:
    return self.second(self.first(x).sin())


def _chained(units: Any, x: Tensor) -> Tensor:
    for one in units:
        x = one(x).sin()
    return x


def _twice(self: Any, x: Tensor) -> Tensor:
    return self.first(x).sin() + self.second(self.first(x.cos()).exp())


def _weights_tied(self: Any, x: Tensor) -> Tensor:
    return F.linear(F.linear(x, self.first.weight).sin(), self.first.weight.t())


units({"weights tied": _weights_tied, "module called twice": _twice})
units(
    {"module with two names": lambda self, x: self.again(self.first(x).sin()).exp()},
    prepare=lambda model: model.units[0].add_module("again", model.units[0].first),
)
units({"weights frozen": _hidden_layer}, prepare=lambda model: model.units[0].first.requires_grad_(False))
units({"all frozen": _hidden_layer}, prepare=lambda model: model.requires_grad_(False))
units(
    {"low rank adapter": lambda self, x: self.first(x) + self.up(F.dropout(self.down(x), 0.1)).sin()},
    parts=lambda: {"down": nn.Linear(8, 2, bias=False), "up": nn.Linear(2, 8, bias=False)},
    prepare=lambda model: [p.requires_grad_(".down" in name or ".up" in name) for name, p in model.named_parameters()],
)
units(
    {"weights shared by units": _twice},
    num_units=2,
    calls=_chained,
    prepare=lambda model: setattr(model.units[1].first, "weight", model.units[0].first.weight),
)
units(
    {"weights shared with the stem": _twice},
    prepare=lambda model: setattr(model.units[0].first, "weight", model.stem.weight),
)
units(
    {"unit called three times": lambda self, x: F.dropout(self.first(x).exp().sin(), 0.1)},
    calls=lambda units, x: _chained([units[0]] * 3, x),
)

# Arguments and results


def _values(found: Any) -> list[Any]:
    if isinstance(found, dict):
        found = list(found.values())
    if isinstance(found, int):
        return [torch.tensor(float(found))]
    if not isinstance(found, (list, tuple)):
        return [found] if isinstance(found, Tensor) and found.is_floating_point() else []
    return [value for one in found for value in _values(one)]


units(
    {
        "dict out": lambda self, x: {"first": self.first(x).sin(), "none": None, "second": self.second(x).exp()},
        "nested out": lambda self, x: (None, [self.first(x).sin(), {"a": self.second(x).exp()}], 3, "word"),
        "input out": lambda self, x: (self.first(x).sin(), x),
        "view of the input out": lambda self, x: (self.first(x).sin(), x[1:]),
        "only the input out": lambda self, x: x,
        "two views out": lambda self, x: self.first(x).sin().chunk(2),
        "value and its alias out": lambda self, x: [(y := self.first(x).sin()), y.view_as(y)],
        "value and its view out": lambda self, x: [(y := self.first(x).sin()), y.t()],
        "the same twice out": lambda self, x: [(y := self.first(x).sin()), y],
        "kept value out": lambda self, x: [(y := self.first(x).sigmoid()), y * 2],
        "no gradient out": lambda self, x: (self.first(x).sin(), x.detach().exp(), x.argmax()),
        "parameter and buffer out": lambda self, x: (self.first(x).sin(), self.weight, self.seen),
    },
    calls=lambda units, x: _values(units[0](x)),
)


def _keywords(self: Any, *, hidden: Tensor, scale: float, how: dict[str, Any]) -> Tensor:
    other, (third, nothing) = how["rest"]
    assert nothing is None
    return getattr(self.first(hidden) * scale, how["mode"])() * other + third


def _integers(self: Any, x: Tensor, order: Tensor, mask: Tensor, number: int) -> Tensor:
    return torch.where(mask, self.first(x) * number, x.index_fill(0, order, 0.5).sin())


units(
    {"keywords and containers": _keywords},
    calls=lambda units, x: units[0](hidden=x, scale=0.5, how={"mode": "sin", "rest": [x.cos(), (x.exp(), None)]}),
)
units(
    {"integers and masks": _integers},
    calls=lambda units, x: units[0](x, torch.tensor([3, 0, 2]), torch.ones(4, 8).tril().bool(), 7),
)
units({"the same twice in": lambda self, x, y: self.first(x).sin() * y.exp()}, calls=lambda units, x: units[0](x, x))
units(
    {"views of one in": lambda self, x, y, z: torch.cat([self.first(x) * y, (z.t() * x).exp()])},
    calls=lambda units, x: units[0](x[:2], x[1:3], x.t()[:, :2]),
)
units(
    {"strides in": lambda self, x, y: self.first(x) * y.sin() + x.exp()},
    calls=lambda units, x: units[0](x.t().contiguous().t(), x[:, :1].expand(4, 8)),
)
units({"no gradient in": _hidden_layer}, calls=lambda units, x: units[0](x.detach()))
units({"two shapes": _hidden_layer}, calls=lambda units, x: units[0](x) + units[0](x[:2]).repeat(2, 1))
units({"double precision": _hidden_layer}, dtype=torch.float64)
units(
    {"half precision": lambda self, x: F.layer_norm(self.second(F.gelu(self.first(x))), (8,)) + x}, dtype=torch.bfloat16
)
units(
    {"complex in and out": lambda self, x: (x * self.first(x.imag)).exp()},
    calls=lambda units, x: units[0](torch.complex(x, x.sin())).real,
)

# Tensors that several readers share


def _across(units: Any, x: Tensor) -> Tensor:
    memory = x.sin()
    for one in units:
        x = one(x, memory)
    return x + memory.exp()


def _biased(units: Any, x: Tensor) -> Tensor:
    bias = None
    for one in units:
        x, bias = one(x, bias)
    return x + bias


def _cross_attention(self: Any, x: Tensor, memory: Tensor) -> Tensor:
    return x + self.first(x) * self.second(memory).sigmoid() + memory.exp() * (memory @ self.weight)


def _position_bias(self: Any, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """T5's first layer computes it, and all others add it to their scores."""
    bias = self.second.weight[:4] if bias is None else bias
    return x + (self.first(x).sin() + bias) * bias.exp(), bias


units({"cross attention": _cross_attention}, num_units=2, calls=_across)
units({"position bias": _position_bias}, num_units=3, calls=_biased)
units(
    {
        "input with many readers": lambda self, x: self.first(x).sin() * x + self.second(x).exp() * x.cos(),
        "weight with many readers": lambda self, x: (
            x @ self.weight + (x.sin() @ self.weight).exp() * self.weight.mean()
        ),
    },
    calls=lambda units, x: units[0](x) * x.sin() + x.exp(),
)

# Autocast


def _weight_cast_twice(self: Any, x: Tensor) -> Tensor:
    """Autocast keeps the cast, whose gradients are added in 16 bits."""
    return self.first(self.first(x).sin()).float() + (self.first(x.cos()) @ self.weight).float()


def _autocast_inside(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        x = (self.first(x).sin() @ self.weight).relu()
    return (x @ self.weight.bfloat16()).float().exp().cos()


def _autocast_off_inside(self: Any, x: Tensor) -> Tensor:
    x = self.first(x)
    with torch.autocast("cpu", enabled=False):
        return self.second(x.float()).exp()


def _number_under_autocast(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (self.first(x) * x.detach().sum().item()).float()


units({"autocast inside": _autocast_inside, "number under autocast": _number_under_autocast})
for _dtype in (torch.bfloat16, torch.float16):
    units(
        {
            f"autocast to {_dtype}": lambda self, x: self.second(
                F.layer_norm(self.first(x).exp(), (8,)).softmax(-1)
            ).float()
        },
        around=partial(torch.autocast, "cpu", _dtype),
    )
units(
    {"weight cast twice": _weight_cast_twice, "autocast off inside": _autocast_off_inside},
    around=partial(torch.autocast, "cpu", torch.bfloat16),
    num_units=2,
    calls=_chained,
)

# Gradients of one's own


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        output = x.sin() * 2
        ctx.save_for_backward(x, output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, output = ctx.saved_tensors
        return gradient * x.cos() + output


class WrittenDouble(torch.autograd.Function):
    """Writes to its result in forward, and to a buffer in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Tensor | None = None) -> Tensor:
        ctx.buffer = buffer
        output = x.sin()
        output *= 2
        ctx.save_for_backward(x, output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.buffer is not None:
            ctx.buffer.copy_(gradient.sum(0))
        x, output = ctx.saved_tensors
        return gradient * x.cos() + output, None


class KernelSine(torch.autograd.Function):
    """Fills a buffer behind PyTorch's back, as a Triton kernel does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        output = torch.empty_like(x)
        output.numpy()[...] = x.detach().sin().numpy()
        ctx.save_for_backward(x, output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, output = ctx.saved_tensors
        return gradient * x.cos() + 0 * output


class Assigned(torch.autograd.Function):
    """Fills a slice of a buffer unseen, as torchdiffeq's adaptive solvers do with their stages."""

    @staticmethod
    def forward(ctx: Any, buffer: Tensor, value: Tensor, index: int) -> Tensor:
        ctx.index = index
        buffer.detach().numpy()[index] = value.detach().numpy()
        return buffer

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, gradient[ctx.index], None


def _stages_assigned(self: Any, x: Tensor) -> Tensor:
    """Reads the slices that are filled, between fillings."""
    stages, now = torch.empty(3, 4, WIDTH), x
    for index in range(3):
        stages = Assigned.apply(stages, self.first(now).sin(), index)
        now = x + stages[: index + 1].sum(0)
    return now


class InPlaceDouble(torch.autograd.Function):
    """Writes into its argument behind PyTorch's back, and says so to autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        values = x.detach().numpy()
        values *= 2
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (doubled,) = ctx.saved_tensors
        return gradient * 2 + 0 * doubled


class Scaled(torch.autograd.Function):
    """Makes floats of integers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * (torch.arange(WIDTH) * 0.37).exp()).float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (torch.arange(WIDTH) * 0.37).exp()


class SineAndCosine(torch.autograd.Function):
    """Its backward asks which gradients there are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Tensor:
        (x,) = ctx.saved_tensors
        of_sine, of_cosine = gradients
        return x if of_sine is None or of_cosine is None else of_sine * x.cos() - of_cosine * x.sin()


def _asks_layout(gradient: Tensor) -> Tensor:
    return gradient if gradient.is_contiguous() else 2 * gradient


class LayoutSine(torch.autograd.Function):
    """Its backward asks how a gradient is laid out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return _asks_layout(gradient) * x.cos()


class UnsqueezedDouble(torch.autograd.Function):
    """Reshapes its result in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.mul(2).unsqueeze_(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.squeeze(1) * 2


def _force_field(self: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        position = x.detach().requires_grad_()
        energy = (position @ self.weight).tanh().square().sum()
    return self.first(x) + torch.autograd.grad(energy, position, create_graph=True)[0]


def _own_checkpoint(self: Any, x: Tensor) -> Tensor:
    inner = checkpoint(lambda y: F.dropout((y @ self.weight).sigmoid(), 0.2), x.sin(), use_reentrant=False)
    return inner.cos()  # type: ignore[no-any-return]


def _saved_on_cpu(self: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        x = (self.first(x).sin() @ self.weight).sigmoid()
    return x.cos() * x


def _inference_inside(self: Any, x: Tensor) -> Tensor:
    """A table made under inference mode: such tensors have no version counter."""
    with torch.inference_mode():
        table = torch.arange(WIDTH).cos()
    return (self.first(x) + table).sin()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _default_dtype_inside(self: Any, x: Tensor) -> Tensor:
    """Integers become floats of the default type."""
    with _default_dtype(torch.float64):
        scale = (torch.arange(WIDTH) * 0.37).exp()
    return (self.first(x) * scale).float().sin()


def _default_dtype_in_a_function(self: Any, x: Tensor) -> Tensor:
    with _default_dtype(torch.float64):
        scaled = Scaled.apply(self.first(x))
    return scaled.sin()


def _denormals_flushed_inside(self: Any, x: Tensor) -> Tensor:
    torch.set_flush_denormal(True)
    small = self.first(x) * 1e-30 * 1e-9
    torch.set_flush_denormal(False)
    return (small * 1e30 * 1e9).sin() + x


def _nested_inside(self: Any, x: Tensor) -> Tensor:
    """As an encoder in evaluation packs its rows."""
    with torch.no_grad():
        rows = torch.nested.nested_tensor([x[0], x[1:].flatten()])
        padded = rows.sin().to_padded_tensor(0.0)
    return self.first(x) * padded.sum()


def _nested_with_gradients(self: Any, x: Tensor) -> Tensor:
    """As attention packs rows of different lengths on a CPU."""
    rows = torch.nested.as_nested_tensor(list(self.first(x).split([1, x.size(0) - 1])))
    return torch.cat([row.sin() for row in self.second(nn.functional.gelu(rows)).unbind()])


def _hooked(self: Any, x: Tensor) -> Tensor:
    x = self.first(x).sin()
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 2)
    return x.exp()


def _jacobian(self: Any, x: Tensor) -> Tensor:
    found = torch.func.vmap(torch.func.jacrev(torch.tanh))(self.first(x)) @ x.unsqueeze(-1)
    return found.squeeze(-1) + torch.func.linearize(torch.tanh, x)[1](x)


units({"input written that is another at times": _written_beside}, calls=_at_times_itself)
units(
    {
        "numbers of complex ones": lambda self, x: torch.view_as_real(
            torch.view_as_complex(self.first(x).reshape(4, -1, 2)).exp()
        ).flatten(1),
    }
)
units(
    {
        "function without one gradient": lambda self, x: SineAndCosine.apply(self.first(x))[1].square(),
        "function that asks for a layout": lambda self, x: LayoutSine.apply(self.first(x)).sum(0) * x,
        "function": lambda self, x: Double.apply(self.first(x)).square(),
        "function that writes to its result": lambda self, x: WrittenDouble.apply(self.first(x)).square(),
        "function that writes unseen": lambda self, x: KernelSine.apply(self.first(x)).square(),
        "function that fills slices": _stages_assigned,
        "function in place": lambda self, x: InPlaceDouble.apply(self.first(x).sin()).square(),
        "function that reshapes in place": lambda self, x: UnsqueezedDouble.apply(self.first(x)).squeeze(1).square(),
        "vmap": lambda self, x: torch.func.vmap(torch.tanh)(self.first(x)).sin(),
        "jacobian": _jacobian,
        "jvp": lambda self, x: torch.func.jvp(torch.tanh, (self.first(x),), (x.sin(),))[1],
        "func grad": lambda self, x: torch.func.grad(lambda y: y.sin().sum())(self.first(x)) * x,
        "force field": _force_field,
        "own checkpoint": _own_checkpoint,
        "saved on cpu inside": _saved_on_cpu,
        "inference inside": _inference_inside,
        "nested tensors inside": _nested_inside,
        "nested tensors with gradients": _nested_with_gradients,
        "default dtype inside": _default_dtype_inside,
        "default dtype in a function": _default_dtype_in_a_function,
        "denormals flushed inside": _denormals_flushed_inside,
        "gradient hook within": _hooked,
    }
)

# Python around the ops

POSITION = contextvars.ContextVar("POSITION", default=2.0)
HIDDEN: contextvars.ContextVar[list[Tensor] | None] = contextvars.ContextVar("HIDDEN", default=None)


def _collected(self: Any, x: Tensor) -> Tensor:
    """Hooks of transformers collect hidden states so."""
    hidden = self.first(x).sin()
    if (collected := HIDDEN.get()) is not None:
        collected.append(hidden)
    return self.second(hidden).exp()


def _collecting(units: Any, x: Tensor) -> Tensor:
    token = HIDDEN.set(collected := [])
    out = units[0](x)
    HIDDEN.reset(token)
    return out + units[0](out).mean() + sum(hidden.exp().mean() for hidden in collected)


def _asks_the_compiler(self: Any, x: Tensor) -> Tensor:
    if torch.compiler.is_compiling() or torch._dynamo.is_compiling():
        return (self.first(x) * 1.000001).sin()
    return self.first(x).sin()


# As Transformers gives all loggers a method.
logging.Logger.say_once = functools.lru_cache(lambda logger, text: logger.debug(text))  # type: ignore[attr-defined]
_logger: Any = logging.getLogger(__name__)


def _asks_for_a_library(self: Any, x: Tensor) -> Tensor:
    """DoRA in PEFT asks so whether weights are quantized."""
    hidden = self.first(x)
    return hidden.sin() if type(self.first.weight).__module__.startswith("torch.") else hidden.cos()


def _asks_of_a_capture(self: Any, x: Tensor) -> Tensor:
    is_captured = False
    for question in (torch.cuda.is_current_stream_capturing, torch.xpu.is_current_stream_capturing):
        try:
            is_captured = is_captured or question()
        except RuntimeError:  # PyTorch was built without such devices.
            pass
    return self.first(x).cos() if is_captured else self.first(x).sin()


def _logs_once(self: Any, x: Tensor) -> Tensor:
    _logger.say_once("slow")
    return self.first(x).sin()


def _static_address(self: Any, x: Tensor) -> Tensor:
    made = torch.zeros_like(x)
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(made)
    return made.copy_(self.first(x)).sin()


def _marked_dynamic(self: Any, x: Tensor) -> Tensor:
    made = torch.zeros_like(x)
    torch._dynamo.mark_dynamic(made, 0)
    return self.first(x) + made


def _counter(self: Any, x: Tensor) -> Tensor:
    self.count += 1
    return (self.first(x) * self.count).sin()


def _auxiliary_losses(self: Any, x: Tensor) -> Tensor:
    scores = self.second(x).softmax(-1)
    self.losses.append(scores.square().sum())
    return self.first(x) * scores


def _earlier_call(self: Any, x: Tensor) -> Tensor:
    output = self.first(x).sin() + getattr(self, "last", 0.0)
    self.last = output.detach()
    return output


def _loop_over_experts(self: Any, x: Tensor) -> Tensor:
    choice = self.first(x).argmax(-1) % 3
    output = x.clone()
    for index, expert in enumerate(self.experts):
        tokens = (choice == index).nonzero().squeeze(-1)
        output = output.index_add(0, tokens, expert(x[tokens]).tanh())
    return output


def _all_experts(self: Any, x: Tensor) -> Tensor:
    weights = self.first(x).softmax(-1)
    return sum(expert(x).tanh() * weights[:, i, None] for i, expert in enumerate(self.experts))


units(
    {
        "branch on data": lambda self, x: self.first(x).sin() if x.sum() > 0 else self.second(x).cos(),
        "branch on training": lambda self, x: F.dropout(self.first(x), 0.5) if self.training else self.second(x),
        "asks the compiler": _asks_the_compiler,
        "context variable": lambda self, x: self.first(x) * POSITION.get(),
        "asks of a capture": _asks_of_a_capture,
        "asks for a library": _asks_for_a_library,
        "logs once": _logs_once,
        "static address": _static_address,
        "marked dynamic": _marked_dynamic,
        "counter": _counter,
        "auxiliary losses": _auxiliary_losses,
        "attribute of an earlier call": _earlier_call,
    }
)
units(
    {"loop over experts": _loop_over_experts, "all experts": _all_experts},
    parts=lambda: {"experts": nn.ModuleList(nn.Linear(8, 8) for _ in range(3))},
)
units(
    {"attribute that changes": lambda self, x: (self.first, self.second, torch.sin)[self.count](x).exp()},
    calls=lambda units, x: (setattr(units[0], "count", (units[0].count + 1) % 3), units[0](x))[1],
)
units(
    {"a global that changes": lambda self, x: self.first(x).sin() * SCALE[0]},
    calls=lambda units, x: (SCALE.__setitem__(0, SCALE[0] % 2 + 1), units[0](x))[1],
)

# Hooks: on the unit, where they run around it, and inside


def _scaled_gradients(module: Any, gradients: Any, *_: Any) -> Any:
    return tuple(None if one is None else one * 2 for one in gradients)


def _halved(parameter: Any) -> None:
    parameter.grad.mul_(0.5)


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward hook": lambda part: part.register_forward_hook(lambda module, args, output: output * 2),
    "forward pre hook": lambda part: part.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "full backward hook": lambda part: part.register_full_backward_hook(_scaled_gradients),
    "full backward pre hook": lambda part: part.register_full_backward_pre_hook(_scaled_gradients),
    "gradient hook": lambda part: next(part.parameters()).register_hook(lambda gradient: gradient * 2),
    "post-accumulate hook": lambda part: next(part.parameters()).register_post_accumulate_grad_hook(_halved),
}
for _name, _register in HOOKS.items():
    units({f"{_name} on it": _hidden_layer}, prepare=lambda model, add=_register: add(model.units[0]))
    units({f"{_name} inside": _hidden_layer}, prepare=lambda model, add=_register: add(model.units[0].second))

# What is new goes to the end: the contracts choose plans by the number of a unit


class _Neighbours(nn.Module):
    """Adds up the neighbours of each row, as graph networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", (torch.rand(ROWS, ROWS) < 0.5).float().to_sparse())

    def forward(self, x: Tensor) -> Any:
        return self.edges @ x.tanh()


modules({"sparse buffer": _Neighbours}, _inner)


def _weight_written_as_data(self: Any, x: Tensor) -> Tensor:
    """As weights are clipped, and learned scales set: unseen by autograd, which then reads the new ones."""
    scaled = (x * self.first.bias).exp()
    self.first.bias.data.mul_(0.9)
    return self.second(scaled.sin())


def _weight_assigned_as_data(self: Any, x: Tensor) -> Tensor:
    scaled = (x * self.first.bias).exp()
    self.first.bias.data = self.first.bias.data * 0.9
    return self.second(scaled.sin())


units(
    {"weight written as data": _weight_written_as_data, "weight assigned as data": _weight_assigned_as_data},
    calls=lambda units, x: units[0](x) + units[0](x.sin()),
)


class GlobalScale(torch.autograd.Function):
    """Its backward reads what is set after forward, as the scales of auxiliary losses are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * SCALE[0]


class UnitScale(GlobalScale):
    """Its backward reads an attribute of the unit that it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unit: Unit) -> Tensor:
        ctx.unit = unit
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.unit.count, None


def _scaled_afterwards(units: Any, x: Tensor) -> Tensor:
    x = units[0](x)
    units[0].count = units[0].count % 3 + 1
    SCALE[0] = units[0].count
    return x


units(
    {
        "function that reads a global in backward": lambda self, x: GlobalScale.apply(self.first(x)).exp(),
        "function that reads its unit in backward": lambda self, x: UnitScale.apply(self.first(x), self).exp(),
        "custom op that reads a global in backward": lambda self, x: scaled_sine(self.first(x)).exp(),
    },
    calls=_scaled_afterwards,
)


def _four_products(self: Any, x: Tensor) -> Tensor:
    return self.second(self.second(self.first(self.first(x).sin()).exp()).sin())


units(
    {"weights tied in one of two units": _four_products},
    num_units=2,
    calls=_chained,
    prepare=lambda model: setattr(model.units[1].second, "weight", model.units[1].first.weight),
)


def _weight_read_again(self: Any, x: Tensor) -> Tensor:
    """One parameter that holds another weight for each layer, as where weights come from the host."""
    for scale in (0.9, 0.8):
        x = (x + self.first.bias).tanh()
        self.first.bias.data = self.first.bias.data * scale
    return self.second(x)


def _weights_made_inside(self: Any, x: Tensor) -> Tensor:
    """Each dies with its only reader, and the next one has its address."""
    x = self.first(x)
    for scale in (1.0, 2.0, 3.0):
        x = (x + nn.Parameter(self.seen * scale, requires_grad=False)).tanh()
    return x


units({"weight assigned as data and read again": _weight_read_again, "weights made inside": _weights_made_inside})


class _SparseWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(ROWS).to_sparse(), requires_grad=False)

    def forward(self, x: Tensor) -> Any:
        return torch.sparse.mm(self.weight, x.tanh()) + torch.sparse.mm(self.weight, x.exp())


class _InferenceWeights(nn.Module):
    """Tensors made in inference mode have no version counter; ops read one twice, and one before it is written to."""

    def __init__(self) -> None:
        super().__init__()
        with torch.inference_mode():
            self.bias = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
            self.register_buffer("seen", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Any:
        x = ((x + self.bias).sin() + self.bias).sin() - self.seen
        with torch.inference_mode():
            self.seen += 1
        return x.exp() - self.seen


class ScaledWeight(torch.autograd.Function):
    """Its backward reads an attribute of the weight that it saved, as quantized ones have scales."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight.t() * getattr(weight, "scale", 1.0), x.t() @ gradient


units(
    {
        "function that reads an attribute of a weight": lambda self, x: ScaledWeight.apply(
            self.first(x).sin(), self.weight
        )
    },
    prepare=lambda model: setattr(model.units[0].weight, "scale", 0.5),
)


def _at_times_a_view(units: Any, x: Tensor) -> Any:
    units[0].count += 1
    return units[0](x, (x if units[0].count % 3 else x.sin())[:, :4])


units({"custom op on a list": lambda self, x: torch.stack(sines([self.first(x), x.exp()])).exp().sum(0)})
units(
    {"view of the other input at times": lambda self, x, y: self.first(x).sin() * torch.cat([x[:, :4].exp(), y], 1)},
    calls=_at_times_a_view,
)
modules({"sparse weight": _SparseWeight, "weights of inference mode": _InferenceWeights}, _inner)


class _Answering(nn.Module):
    """Answers for old names of attributes, as models of diffusers do, and parts of it as well."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))

    def __getattr__(self, name: str) -> Any:
        return self.parts if name == "old_parts" else super().__getattr__(name)

    def forward(self, x: Tensor) -> Any:
        return self.parts(x).sin()


modules({"attributes that are asked for": lambda: nn.Sequential(_Answering(), _Answering())}, _inner)

# What the graph engine says of units that it leaves to the tape; or Dynamo, whose words change.
_WORDS: dict[str, tuple[str, ...]] = {
    ".": (
        *("lstm", "gru", "scripted part", "batch norm", "own generator", "seeds of its own", "random of python"),
        *("random of numpy", "layer drop", "input written", "data assigned", "resized", "jacobian", "force field"),
        *("saved on cpu inside", "branch on data", "sparse buffer", "weights made inside"),
        *("sparse weight", "weights of inference mode"),
        *(
            "nested tensors inside",
            "nested tensors with gradients",
            "default dtype inside",
            "default dtype in a function",
            "denormals flushed inside",
        ),
        *("full backward hook inside", "full backward pre hook inside"),
    ),
    "Attempt to trace forbidden callable": ("marked dynamic",),
    "RuntimeError when making fake tensor call": ("function that fills slices",),
    "reads memory between the writes to it": ("random relu in place",),
    "writes random numbers in place": ("written by a custom op", "constant written by a custom op"),
    "gives back depends on data": (
        *("one element", "loop over experts", "mask of data", "number under autocast"),
        *("number written to before it is read", "number drawn and read", "number written to as bytes"),
    ),
    "it returns a view of an input": ("view of the input out", "position bias", "spectral norm"),
    "it returns the same memory twice, with and without a gradient": ("attribute of an earlier call",),
    "it returns the same memory twice: once as a view from before a write to it": ("alias from before a write out",),
    "it runs other ops than in eager mode": (
        *("one hot", "compiled part", "attribute that changes", "numpy inside", "slices filled out of sight"),
        *("function that writes unseen", "function without one gradient", "function that asks for a layout"),
        *("function that reads a global in backward", "function that reads its unit in backward"),
        "custom op that reads a global in backward",
    ),
    "its calls differ, and each would have to be traced: 'count ==": ("counter",),
    "it writes to an input that needs a gradient": (
        *("embedding with a maximum norm", "weight written as data", "weight assigned as data"),
        "weight assigned as data and read again",
    ),
    "would run again, and write to what is kept once more": ("statistics written",),
    "it runs other ops than in eager mode|a Function in it returns the same tensor twice": ("function in place",),
    "a Function in it returns the same tensor twice when it is traced": ("function that writes to its result",),
    "chooses its ops by a tensor's contents": (
        *("product", "cumulative product", "largest of all", "median of all", "filled with a number that learns"),
    ),
    r"a Function in it calls aten\.unsqueeze_": ("function that reshapes in place",),
    r"it calls aten\.transpose_\.default on an input, or on a tensor with views": ("layout changed beside a view",),
    "it turns autocast on where a block around it has it off": ("autocast inside a block that is off",),
    # torch 2.11 quotes the line.
    r"it calls register_hook|x\.register_hook\(": ("gradient hook within",),
    "it calls tag_activation_checkpoint": ("own checkpoint",),
    "torch.jit.script has a backward of its own": ("scripted function",),
}
WHY_NOT = {name: words for words, names in _WORDS.items() for name in names}
# Of these, what newer versions of PyTorch trace, to the same bits.
TRACED_LATER = ("random of python", "function that writes to its result")


def _layout_changed_beside_a_view(self: Any, x: Tensor) -> Tensor:
    square = self.first(x)[:, :4] * 1.5
    row, same = square[0], square.view_as(square)
    square.transpose_(0, 1)
    return x * (row.sin() + square.cos() @ same).mean()


def _one_result_of_two_written(self: Any, x: Tensor) -> Tensor:
    variance, mean = torch.var_mean(self.first(x), 1, keepdim=True)
    centre = mean.exp_()
    return x * variance.sin() * centre.cos()


def _statistics_written_to(self: Any, x: Tensor) -> Tensor:
    variance, mean = torch.var_mean(self.first(x), -1, keepdim=True)
    before = mean[:]
    mean.mul_(2)
    return x * variance.sin() * before.cos()


def _read_before_it_is_written(self: Any, x: Tensor) -> Tensor:
    made = self.first(x)
    grown = made.exp()
    bent = torch.tanh(made[:] + grown)
    return x * grown * bent * made.relu_()


units(
    {
        "one result of two written": _one_result_of_two_written,
        "layout changed beside a view": _layout_changed_beside_a_view,
        "read before it is written": _read_before_it_is_written,
        "results made again beside one written to": _statistics_written_to,
        # It saves a copy of what it writes to.
        "hardswish in place": lambda self, x: x * F.hardswish(self.first(x), inplace=True),
    }
)
units(
    {
        "value, its alias and a reader out": lambda self, x: [(y := self.first(x)), y[:], y.sin()],
        "alias before its value out": lambda self, x: [(y := self.first(x))[:], y, y.sin()],
        "two aliases out": lambda self, x: [(y := self.first(x)), y[:], y.view_as(y)],
        "alias written to out": lambda self, x: [(y := self.first(x)), y[:].mul_(2)],
        "alias from before a write out": lambda self, x: [(y := self.first(x))[:], y.relu_(), y.sin()],
    },
    # Several readers of each, whose gradients are added up in one order.
    calls=lambda units, x: [read(one) for one in units[0](x) for read in (Tensor.sin, Tensor.cos, Tensor.tanh)],
)
units(
    {
        "view of one column out": lambda self, x: [self.first(x).sin()[:, :1].t()],
        "view of one column and its alias out": lambda self, x: [(y := self.first(x).sin()[:, :1].t()), y[:]],
    },
    # Convolutions choose their kernel by the strides of channels, even of a single one.
    calls=lambda units, x: [one * (one.stride(0) + 1) for one in units[0](x)],
)
units(
    {
        "transposed view out, written to": lambda self, x: self.first(x.t().contiguous().t()).t().contiguous().t(),
        "part of a sum out, written to": lambda self, x: torch.cat([self.first(x) + x, x], 1)[:, :8],
    },
    calls=lambda units, x: units[0](x).add_(1),
)
units(
    {"autocast inside a block that is off": _autocast_inside},
    around=partial(torch.autocast, "cpu", enabled=False),
    calls=lambda units, hidden: units[0](units[0](hidden)),
)


def _named_elsewhere_too(model: Model) -> None:
    unit = model.units[0]
    unit.parts, unit.by_name = [unit.first, nn.Linear(WIDTH, WIDTH)], {"last": unit.second}


units(
    {
        "parts that a list and a dict hold": lambda self, x: self.by_name["last"](
            self.parts[1](self.parts[0](x).sin()).exp()
        )
    },
    prepare=_named_elsewhere_too,
)


def _by_lengths(self: Any, x: Tensor, ends: Tensor) -> Tensor:
    """Attention goes by the lengths of sequences so."""
    parts = self.first(x).split((ends[1:] - ends[:-1]).tolist())
    return torch.cat([one.softmax(0).exp() for one in parts])


def _checked(self: Any, x: Tensor, ends: Tensor) -> Tensor:
    torch._check_tensor_all_with(ValueError, (ends * ends[1]).sum() == len(x), lambda: "got other lengths")
    return self.first(x).exp()


units({"collected": _collected}, calls=_collecting)
units({"lengths read": _by_lengths}, calls=lambda units, x: units[0](x, torch.tensor([0, 1, 4])))
units(
    {
        "number read": lambda self, x, ends: self.first(x).mul(ends.diff().max().item()).exp(),
        "numbers checked": _checked,
        "number written to before it is read": lambda self, x, ends: (
            self.first(x).mul([ends.data[1:].add_(1), ends.max().item()][1]).sin()
        ),
        "number drawn and read": lambda self, x, ends: (
            self.first(x).mul(torch.randint_like(ends, 9).max().item()).sin()
        ),
    },
    calls=lambda units, x: units[0](x, torch.tensor([0, 1, 3])),
)
units(
    {
        "number written to as bytes": lambda self, x, ends: (
            self.first(x).mul([ends[1].mul_(2), ends[0].max().item()][1]).sin()
        )
    },
    calls=lambda units, x: units[0](x, (ends := torch.tensor([0, 1, 3]), ends.view(torch.int8))),
)


def _one_pixel_channels_last(self: Any, x: Tensor) -> Tensor:
    """Pyramids of poolings have images of one pixel, whose strides say how what is made of them lies in memory."""
    pixel = self.first(x).view(4, 1, 8).transpose(1, 2).reshape(4, 8, 1, 1)
    normed = F.batch_norm(pixel, None, None, training=True)
    return x + F.interpolate(normed, size=(2, 2), mode="bilinear").sin().mean((2, 3))


units({"one pixel, channels last": _one_pixel_channels_last})


def _scripted(x: Tensor, bias: Tensor) -> Tensor:
    shifted = x + bias
    return shifted * 0.5 * (1.0 + torch.tanh(0.79788456 * shifted * (1 + 0.044715 * shifted * shifted)))


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    SCRIPTED: Any = torch.jit.script(_scripted)
for _ in range(3):  # From the second time on, TorchScript differentiates it by itself.
    SCRIPTED(torch.ones(ROWS, WIDTH, requires_grad=True), torch.ones(WIDTH, requires_grad=True)).sum().backward()
units(
    {
        "scripted function": lambda self, x: self.second(SCRIPTED(x @ self.weight, self.first.bias)),
        "scripted function without gradients": lambda self, x: self.second(SCRIPTED(x.detach(), self.seen) * x),
    }
)
units(
    {"weight pruned": _hidden_layer},
    prepare=lambda model: prune.l1_unstructured(model.units[0].second, "weight", 0.5),
)
