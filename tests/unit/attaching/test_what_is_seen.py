"""What `attach` cannot see, or cannot hold, it says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import recollect
from recollect.errors import BudgetWarning, NotYetError


def layers() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))


class Holder(nn.Module):
    """Has layers, and no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()


def through(model: nn.Module, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = x + layer(x)
    return x.square().mean()


def test_a_loop_that_calls_the_layers_one_by_one_is_told() -> None:
    model = Holder()
    optimizer = torch.optim.AdamW(model.parameters())
    with recollect.attach(model, optimizer, "100%", log=lambda _: None) as attached:
        through(model, torch.randn(16, 32)).backward()
        with pytest.warns(BudgetWarning, match=r"stepped, but Holder was not called .* attached.call\(\.\.\.\)"):
            optimizer.step()
        assert attached.planned == []
        optimizer.zero_grad()
        attached.call(through, model, torch.randn(16, 32)).backward()
        optimizer.step()
        assert attached.recorded_steps == [0]
        assert str(attached.planned[0].calls[0]) == "16 x 32"


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs PyTorch with the gloo backend")
@pytest.mark.usefixtures("one_process")
def test_a_sharded_model_is_refused() -> None:
    model = Holder()
    fully_shard(model.layers[1], mesh=dist.init_device_mesh("cpu", (1,)))
    with pytest.raises(
        NotYetError, match=r"got model='fully_shard\(layers\.1\)': not yet: parameters that are gathered"
    ):
        recollect.attach(model, torch.optim.AdamW(model.parameters()), "100%")
