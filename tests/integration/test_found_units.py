"""Models whose layers are no children of one list: recorded, planned half way, and exact, without naming any unit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from gradients import assert_same_gradients, call, gradients, loss_of
from predictions import LEAN_LOOP, MOST_OVER_BYTES, budgets
from recollect.measuring.meter import measure_peak, storage_bytes
from recollect.planning.choose import Planner
from zoo import Batch

pytestmark = pytest.mark.integration

WIDTH = 32


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.attention(normed, normed, normed, need_weights=False)[0]


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(x)


class Pairs(nn.Module):
    """As in vit-pytorch: `for attention, mlp in self.layers`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleList([Attention(), FeedForward()]) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for attention, mlp in self.layers:
            x = mlp(attention(x))
        return x


class Chain(nn.Module):
    """Runs the modules of a list one after the other."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def convolutions(wide: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(wide, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(), nn.Conv2d(out, out, 3, padding=1), nn.GELU()
    )


class UNet(nn.Module):
    """Down and up again, of `Sequential`s by name."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = convolutions(3, 8), convolutions(8, 16), convolutions(16, 16)
        self.up2, self.up1 = convolutions(32, 8), convolutions(16, 8)
        self.pool = nn.MaxPool2d(2)
        self.larger = nn.Upsample(scale_factor=2)
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(self.pool(first))
        x = self.larger(self.middle(self.pool(second)))
        x = self.larger(self.up2(torch.cat([x, second], 1)))
        result: Tensor = self.head(self.up1(torch.cat([x, first], 1)))
        return result


class Repeated(nn.Module):
    """One block several times, as in ALBERT, universal transformers and recurrent depth."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for _ in range(4):
            x = self.block(x)
        result: Tensor = self.head(x)
        return result


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)[0]
        return x


class Functional(nn.Module):
    """Everything in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.second(nn.functional.gelu(self.first(x)).sin())
        return x


def flat_stack() -> nn.Module:
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 4))


def images() -> Batch:
    return torch.randn(4, 3, 16, 16)


def sequences() -> Batch:
    return torch.randn(16, 24, WIDTH)


def tokens() -> Batch:
    return torch.randint(0, 50, (16, 24))


def numbered(prefix: str, count: int) -> tuple[str, ...]:
    return tuple(f"{prefix}.{index}" for index in range(count))


@dataclass(frozen=True)
class Found:
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    layers: tuple[str, ...]


MODELS: dict[str, Found] = {
    "pairs in lists": Found(
        Pairs, sequences, tuple(f"layers.{layer}.{part}" for layer in range(3) for part in range(2))
    ),
    "U-Net of Sequential": Found(UNet, images, ("down1", "down2", "middle", "up2", "up1")),
    "one block, repeated": Found(Repeated, tokens, ("block",)),
    "list of LSTM": Found(Recurrent, sequences, numbered("layers", 3)),
    "flat stack": Found(flat_stack, sequences, ("",)),
    "no parts": Found(Functional, sequences, ("",)),
}


def mean_square(output: Any) -> Tensor:
    return loss_of(output) if isinstance(output, dict) else output.square().mean()


@pytest.mark.parametrize("name", MODELS)
def test_planned_half_way(name: str) -> None:
    """Gradients equal to the bit, and the predicted peak is the measured one."""
    found = MODELS[name]
    torch.manual_seed(0)
    model, batch = found.build().train(), found.batch()
    profile = recollect.record(model, batch, loss_fn=mean_square, **LEAN_LOOP)
    assert tuple(dict.fromkeys(call.path for call in profile.calls if call.repeated)) == found.layers
    planner = Planner(profile)
    (budget_bytes,) = budgets(planner, (0.5,))
    plan = planner.plan(budget_bytes)
    assert any(unit.recomputes_anything for unit in plan.units.values())
    expected = gradients(model, batch, mean_square)
    with recollect.apply(model, plan):
        assert_same_gradients(expected, gradients(model, batch, mean_square))
        growth_bytes = measure_peak(lambda: mean_square(call(model, batch)).backward(), device="cpu").peak_growth_bytes
    model.zero_grad()
    resident = [*model.parameters(), *model.buffers(), *(batch.values() if isinstance(batch, dict) else [batch])]
    measured_bytes = storage_bytes(resident) + growth_bytes
    assert 0 <= (plan.predicted_peak_bytes or 0) - measured_bytes <= MOST_OVER_BYTES
    assert plan.predicted_peak_bytes <= budget_bytes  # type: ignore[operator]


class TakenApart(nn.Module):
    """Has containers, but runs what is in them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.first, *self.second):
            x = layer(x)
        return x


def test_layers_that_do_not_run() -> None:
    model, batch = TakenApart(), sequences()
    message = (
        r"^none of the 2 layers of TakenApart ran, such as 'first': its forward does not call them, but perhaps what is in "
        r'them, so they recompute nothing\. Name modules that it calls, or plan it as one: units=\[""\]\.$'
    )
    with pytest.warns(UserWarning, match=message):
        assert recollect.record(model, batch, loss_fn=mean_square).calls == ()
    profile = recollect.record(model, batch, loss_fn=mean_square, units=[""])
    assert recollect.plan(profile, "90%").units[""].recomputes_anything
