"""Costs of ops as they are measured: one number for runs that do the same work, another for any that do not."""

import pytest
import torch
from torch import Tensor

from recollect.costs.op_costs import MeasuredCosts, OpRun
from recollect.engine.facts import facts_of

EXP = torch.ops.aten.exp.default


def working_bytes(*arguments: Tensor) -> list[int]:
    """What each run of an op is said to need, all in one step."""
    costs = MeasuredCosts(torch.device("cpu"))
    runs: list[OpRun] = []
    with costs.recording():
        for argument in arguments:
            _, run = costs.run(EXP, facts_of(EXP), (argument,), {}, may_repeat=False)
            runs.append(run)
    return [costs.working_bytes_of(run.key) for run in runs]


def test_equal_arguments_share_a_cost() -> None:
    costs = MeasuredCosts(torch.device("cpu"))
    with costs.recording():
        keys = [costs.run(EXP, facts_of(EXP), (torch.ones(10),), {}, may_repeat=False)[1].key for _ in range(2)]
    assert keys[0] == keys[1]


@pytest.mark.parametrize(
    ("other", "nbytes"),
    [(torch.ones(1000, dtype=torch.float64), 8000), (torch.ones(500), 2000), (torch.ones(10).expand(1000, 10), 40_000)],
    ids=["dtype", "shape", "stride"],
)
def test_an_op_on_another_layout_has_its_own_cost(other: Tensor, nbytes: int) -> None:
    assert working_bytes(torch.ones(1000), other) == [4000, nbytes]
