"""Plans for units that run from traces: where they stay on the tape, and what a plan says of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import recollect
from blocks import Block
from recollect.errors import BudgetTooSmallError
from recollect.profile.profile import Profile


def recorded(num_layers: int, *, fake: bool = False, split_backward: bool = False) -> Profile:
    model = nn.Sequential(*(Block(16, 0.0) for _ in range(num_layers)))
    x = torch.randn(32, 16, requires_grad=True)
    return recollect.record(
        model,
        x,
        loss_fn=torch.sum,
        holds_output=False,
        fake=fake,
        gradients="accumulated",
        split_backward=split_backward,
    )


@pytest.fixture(scope="module")
def modelled() -> Profile:
    return recorded(16, fake=True)


def engines(plan: recollect.Plan) -> set[str]:
    return {str(unit.engine) for unit in plan.units.values() if unit.recomputes_anything}


def test_a_plan_says_that_the_budget_takes_the_tape(modelled: Profile) -> None:
    with pytest.raises(BudgetTooSmallError) as error:
        recollect.plan(modelled, 0)
    least = error.value.least_peak_bytes
    graph, auto = (recollect.plan(modelled, least, engine=engine) for engine in ("graph", "auto"))  # type: ignore[arg-type]
    assert "tape" in engines(graph)
    assert graph.note.endswith("layers run on the tape: no plan found with all from traces fits the budget")
    assert "tape" in engines(auto)
    assert "layers" not in auto.note


def test_a_plan_says_why_layers_were_not_traced(modelled: Profile) -> None:
    graphs = tuple(replace(graph, why_not_traced="it reads the clock") for graph in modelled.graphs)
    plan = recollect.plan(replace(modelled, graphs=graphs), "70%", engine="graph")
    number = sum(unit.recomputes_anything for unit in plan.units.values())
    assert plan.note.endswith(f"; {number} of {number} layers run on the tape: it reads the clock")
    assert engines(plan) == {"tape"}
    assert "layers" not in recollect.plan(modelled, "70%", engine="graph").note


@pytest.mark.parametrize(("split_backward", "engine"), [(False, "graph"), (True, "tape")])
def test_the_choice_of_an_engine(split_backward: bool, engine: str) -> None:
    """A trace runs all of backward in each half; otherwise the tape's own work shows in layers as small as these."""
    profile = recorded(3, split_backward=split_backward)
    assert engines(recollect.plan(profile, "70%", engine="auto")) == {engine}
