"""Plans for `blocks.Stack`, made by hand, and the ops that run under them."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import recollect
from blocks import Stack, mean_square
from gradients import call, clear, loss_of
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from recorded_once import recorded_once
from watch import Watch

ROWS = torch.linspace(-1, 1, 12 * 16).reshape(12, 16)
BLOCK_VALUES = ("norm.native_layer_norm.0", "up.addmm", "gelu", "down.addmm", "add")


def stack(dropout: float = 0.0) -> Stack:
    torch.manual_seed(0)
    return Stack(width=16, depth=3, dropout=dropout)


def full(model: nn.Module, batch: Any, loss_fn: Callable[[Any], Tensor] | None = None) -> Plan:
    return recollect.classic_plan(recorded_once(model, batch, loss_fn=loss_fn), "full")


def block_plan(*recompute: str, paths: tuple[str, ...] = ("blocks.0", "blocks.1", "blocks.2")) -> Plan:
    """A plan that names every value of a `blocks.Block`, some of them to be computed again."""
    names = [*BLOCK_VALUES, "norm.native_layer_norm.1", "norm.native_layer_norm.2"]
    actions = {name: "recompute" if name in recompute else "keep" for name in names}
    return Plan(dict.fromkeys(paths, UnitPlan(actions)))  # type: ignore[arg-type]


def ops(model: nn.Module, batch: Any) -> Counter[str]:
    clear(model, batch)
    with Watch() as watch:
        loss_of(call(model, batch), mean_square).backward()
    return watch.computing_ops()
