"""Units that communicate run once while a step is recorded: alone in one process they would wait for the others for ever."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce

import recollect

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs PyTorch with torch.distributed")


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """The first of two; the fake group has nobody to wait for."""
    dist.init_process_group("fake", rank=0, world_size=2)
    yield
    dist.destroy_process_group()


class Reduced(torch.autograd.Function):
    """Sums over ranks in forward or in backward, as Megatron's layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, in_forward: bool) -> Tensor:
        ctx.in_forward = in_forward
        return torch.Tensor(all_reduce(x, "sum", dist.group.WORLD)) if in_forward else x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        return gradient if ctx.in_forward else torch.Tensor(all_reduce(gradient, "sum", dist.group.WORLD)), None


class Layer(nn.Module):
    num_runs = 0

    def __init__(self, communicates: str) -> None:
        super().__init__()
        self.up, self.down, self.communicates = nn.Linear(16, 64), nn.Linear(64, 16), communicates

    def forward(self, x: Tensor) -> Tensor:
        Layer.num_runs += 1
        if self.communicates == "functional":
            return self.down(all_reduce(self.up(x), "sum", dist.group.WORLD).relu())
        if self.communicates:
            x = Reduced.apply(x, self.communicates == "forward")
        return self.down(self.up(x).relu())


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("communicates", ["", "forward", "backward", "functional"])
def test_a_unit_that_communicates_runs_once(communicates: str) -> None:
    model = nn.Sequential(*(Layer(communicates) for _ in range(3)))
    Layer.num_runs = 0
    profile = recollect.record(model, torch.randn(8, 16, requires_grad=True), loss_fn=torch.sum)
    assert len(profile.calls) == 3
    assert Layer.num_runs == 3


@pytest.mark.usefixtures("two_ranks")
def test_what_a_loop_communicates_after_backward_is_of_no_unit() -> None:
    model = nn.Sequential(*(Layer("") for _ in range(3)))

    def step() -> None:
        model(torch.randn(8, 16, requires_grad=True)).sum().backward()
        all_reduce(torch.stack([parameter.grad.norm() for parameter in model.parameters()]), "sum", dist.group.WORLD)

    profile = recollect.record(model, step=step, engine="graph")
    assert all(profile.graph_of(call).joint for call in profile.calls), [g.why_not_traced for g in profile.graphs]
