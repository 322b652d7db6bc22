"""Layers timed while they run again as a whole, and plans that choose that where it is faster than the tape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from gradients import assert_same_gradients, gradients
from predictions import budgets
from recollect.errors import NotYetError, PlanError
from recollect.planning.choose import Planner
from recollect.plans.action import EngineChoice
from recollect.profile.profile import Profile

ROWS, WIDTH = 64, 32


class Block(nn.Module):
    """[n, 32] -> [n, 32], with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.down(nn.functional.dropout(self.up(x).tanh().exp(), 0.1))
        return output


class Stack(nn.Module):
    """[n, 32] -> a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.fixture(scope="module")
def profile() -> Profile:
    torch.manual_seed(0)
    return recollect.record(Stack(), torch.randn(ROWS, WIDTH), engine="region")


def taking(profile: Profile, rerun_s: float) -> Profile:
    return replace(profile, graphs=tuple(replace(g, rerun_s=rerun_s if g.rerun_s else 0.0) for g in profile.graphs))


def half(profile: Profile) -> recollect.Plan:
    planner = Planner(profile)
    (budget_bytes,) = budgets(planner, (0.5,))
    return planner.plan(budget_bytes)


def engines(plan: recollect.Plan) -> set[EngineChoice]:
    return {unit.engine for unit in plan.units.values()}


def test_repeated_layers_are_timed(profile: Profile) -> None:
    for call in profile.calls:
        assert (profile.graph_of(call).rerun_s > 0) == call.repeated, call.path
    assert Profile.from_json(profile.to_json()) == profile


def test_the_faster_engine_is_chosen(profile: Profile) -> None:
    quick, slow = taking(profile, 1e-9), taking(profile, 10.0)
    assert EngineChoice.REGION in engines(half(quick))
    assert engines(half(slow)) == {EngineChoice.TAPE}
    assert half(slow).predicted_slowdown == half(taking(profile, 0.0)).predicted_slowdown


def test_no_bound_is_claimed(profile: Profile) -> None:
    planner = Planner(profile)
    assert planner.bound_slowdown(planner.plain_peak_bytes // 2) is None
    assert half(profile).bound_slowdown is None


def test_gradients_and_budget_of_a_chosen_rerun(profile: Profile) -> None:
    model, x = Stack(), torch.randn(ROWS, WIDTH)
    expected = gradients(model, x)
    plan = half(taking(profile, 1e-9))
    with recollect.apply(model, plan):
        assert_same_gradients(expected, gradients(model, x))
    assert plan.predicted_peak_bytes is not None and plan.budget_bytes is not None
    assert plan.predicted_peak_bytes <= plan.budget_bytes


def test_a_layer_that_cannot_be_copied_stays_on_the_tape() -> None:
    class Locked(Block):
        def __deepcopy__(self, _: Any) -> Any:
            raise TypeError("there is one of these")

    model = Stack()
    model.blocks = nn.ModuleList(Locked() for _ in range(2))
    found = recollect.record(model, torch.randn(ROWS, WIDTH), engine="region")
    assert not any(graph.rerun_s for graph in found.graphs)


def test_attach_measures_at_the_end_of_a_step() -> None:
    model, x = Stack(), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recollect.attach(model, optimizer, "100%", engine="region", log=lambda line: None) as handle:
        for _ in range(2):
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert any(graph.rerun_s for graph in handle.planned[0].profile.graphs)


def test_host_memory_is_for_the_tape(profile: Profile) -> None:
    with pytest.raises(NotYetError, match="engine='region', host_budget='1GiB': not yet: copies to host memory"):
        recollect.fit(Stack(), torch.randn(ROWS, WIDTH), "90%", engine="region", host_budget="1GiB")
    with pytest.raises(PlanError, match="got a profile for other engines, expected one recorded with engine='tape'"):
        recollect.plan(profile, "90%", host_budget="1GiB")
