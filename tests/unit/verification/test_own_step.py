"""`verify` with a step of the user's own, and what it says of the time that a step takes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from blocks import Stack
from recollect.plans.plan import Plan
from recollect.verification import verify as of_verify
from watch import Watch

ROWS = torch.linspace(-1, 1, 12 * 16).reshape(12, 16)


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def model_and_plan() -> tuple[nn.Module, Plan]:
    torch.manual_seed(0)
    model = Stack(width=16, depth=3)
    return model, recollect.classic_plan(recollect.record(model, ROWS, loss_fn=mean_square), "full")


def test_the_optimizer_of_a_step_is_where_it_was() -> None:
    model, plan = model_and_plan()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step() -> None:
        mean_square(model(ROWS)).backward()
        optimizer.step()

    step()
    before = copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.param_groups[0]["lr"] = 0.05
    report = recollect.verify(model, None, plan, step=step, optimizer=optimizer)
    assert report.equal and report.compared == "step"
    after = optimizer.state_dict()
    assert after["param_groups"][0]["lr"] == 0.05
    assert before.keys() == after["state"].keys() and before
    for number, state in before.items():
        assert all(torch.equal(tensor, after["state"][number][name]) for name, tensor in state.items())


def test_a_plan_that_runs_more_ops_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each op takes as long as any other."""
    model, plan = model_and_plan()
    times: list[int] = []

    def counted(run: Callable[[], Any], _: torch.device) -> tuple[Any, float]:
        with Watch() as watch:
            result = run()
        times.append(len(watch.history))
        return result, times[-1]

    monkeypatch.setattr(of_verify, "timed", counted)
    report = recollect.verify(model, ROWS, plan, loss_fn=mean_square)
    plain, planned = set(times[::2]), set(times[1::2])
    assert len(plain) == len(planned) == 1
    assert report.measured_slowdown == planned.pop() / plain.pop() - 1 > 0
