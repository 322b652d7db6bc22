"""Loops over recurrent cells, whose gates are written in place: a plan for every budget that is above the least."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import recollect
from gradients import assert_same_gradients, gradients
from recollect.errors import BudgetTooSmallError
from recollect.planning.choose import Planner

pytestmark = pytest.mark.integration

WIDTH = 24
CELLS = {"GRU": nn.GRUCell, "LSTM": nn.LSTMCell, "RNN": nn.RNNCell}


class Recurrent(nn.Module):
    def __init__(self, kind: str, num_layers: int) -> None:
        super().__init__()
        self.cells = nn.ModuleList(CELLS[kind](WIDTH, WIDTH) for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = [None] * len(self.cells)
        outputs = []
        for row in x.unbind(1):
            for number, cell in enumerate(self.cells):
                states[number] = cell(row, states[number])
                row = states[number][0] if isinstance(states[number], tuple) else states[number]
            outputs.append(row)
        loss: torch.Tensor = self.head(torch.stack(outputs, 1)).square().mean()
        return loss


@pytest.mark.parametrize("units", [None, "cells"])
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("kind", CELLS)
def test_every_budget_above_the_least_has_a_plan(kind: str, num_layers: int, units: str | None) -> None:
    torch.manual_seed(0)
    model = Recurrent(kind, num_layers)
    batch = torch.randn(16, 8, WIDTH)
    names = None if units is None else [f"{units}.{number}" for number in range(num_layers)]
    planner = Planner(recollect.record(model, batch, optimizer=torch.optim.AdamW(model.parameters()), units=names))
    with pytest.raises(BudgetTooSmallError) as error:
        planner.plan(1)
    least, rng = error.value.least_peak_bytes, random.Random(0)
    plans = [planner.plan(rng.randint(least, planner.plain_peak_bytes)) for _ in range(8)]
    plans.append(planner.plan(least))  # raises if the bound is above it
    for made in plans:
        assert made.predicted_peak_bytes is not None and made.budget_bytes is not None
        assert made.predicted_peak_bytes <= made.budget_bytes
    expected = gradients(model, batch)
    recollect.apply(model, plans[-1])
    assert_same_gradients(expected, gradients(model, batch))
