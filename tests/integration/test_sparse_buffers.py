"""Layers that multiply by a sparse matrix, a buffer of theirs, as graph networks do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import recollect
from gradients import assert_same_gradients, gradients
from policies import EVERY_PLAN
from recollect.applying import apply_policy

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")

NODES = 300
LAYERS = ("0", "1")


class Neighbours(nn.Module):
    """Adds up the neighbours of each node. [n, 16] -> [n, 16]."""

    def __init__(self, sparse: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        dense = (torch.rand(NODES, NODES) < 0.1).float() * torch.rand(NODES, NODES)
        self.register_buffer("edges", sparse(dense))
        self.linear = nn.Linear(16, 16)

    def forward(self, nodes: Tensor) -> Tensor:
        return (self.edges @ self.linear(nodes).tanh()).sin()


@pytest.fixture(params=[Tensor.to_sparse, Tensor.to_sparse_csr], ids=["by entries", "by rows"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Neighbours(request.param), Neighbours(request.param))


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def test_gradients_under_every_plan(model: nn.Module) -> None:
    nodes = torch.randn(NODES, 16)
    expected = gradients(model, nodes, loss_of)
    for name, policy in EVERY_PLAN.items():
        with apply_policy(model, LAYERS, policy):
            assert_same_gradients(expected, gradients(model, nodes, loss_of), name)


def test_recorded_and_verified(model: nn.Module) -> None:
    nodes = torch.randn(NODES, 16)
    profile = recollect.record(model, nodes, loss_fn=loss_of, units=LAYERS)
    assert recollect.verify(model, nodes, recollect.classic_plan(profile, "full"), loss_fn=loss_of).equal
