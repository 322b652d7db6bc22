"""The buckets in which DDP reduces gradients count in profiles, once each, and gradients that are parts of them not again."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

import recollect
from recollect._torch_parallel import GradientBuckets


class Words(nn.Module):
    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8, sparse=sparse)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 20, dtype=torch.float64)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(words)).double()).square().mean()


@pytest.fixture(autouse=True)
def _two_processes() -> Iterator[None]:
    """The first of two, of which the other is not there."""
    dist.init_process_group("fake", rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def replicated(model: nn.Module, **options: Any) -> DistributedDataParallel:
    wrapped = DistributedDataParallel(model, **options)
    # The fake group promises no result to DDP.
    wrapped.register_comm_hook(None, noop_hook)
    return wrapped


def trained_bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.0002}])
def test_they_are_as_large_as_the_gradients(options: dict[str, Any]) -> None:
    model = Words()
    model.layers[0].weight.requires_grad_(False)
    wrapped = replicated(model, **options)
    words = torch.randint(20, (2, 4))
    for _ in range(3):
        assert sum(GradientBuckets(wrapped, may_communicate=True).sizes_bytes) == trained_bytes(model)
        wrapped(words).backward()


def test_sparse_gradients_have_none_and_unused_parameters_a_map() -> None:
    model = Words(sparse=True)
    sizes = GradientBuckets(
        DistributedDataParallel(model, find_unused_parameters=True), may_communicate=True
    ).sizes_bytes
    num_parameters = len(list(model.parameters()))
    assert sum(sizes) == trained_bytes(model) - model.embedding.weight.nbytes + 8 * num_parameters


def planned(*, views: bool) -> list[Any]:
    """What a loop recorded, at its first step and where it grew, which reads gradients outside of forward and backward."""
    torch.manual_seed(0)
    words = torch.randint(20, (2, 1))
    model = replicated(Words(), gradient_as_bucket_view=views)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recollect.attach(model, optimizer, "1MiB", log=lambda line: None) as attached:
        for length in (4, 4, 6):
            model(words.expand(2, length)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            # So that they are there when the last step is recorded.
            optimizer.zero_grad(set_to_none=False)
    return attached.planned


def test_profiles_count_them_once() -> None:
    peaks_bytes = []
    for views in (False, True):
        steps = planned(views=views)
        for persistent in (step.profile.persistent for step in steps):
            assert persistent["communication_buckets"] == trained_bytes(Words())
            assert persistent.get("other_tensors", 0) < 256
            assert persistent.get("other_allocations", 0) < 256
        peaks_bytes.append(steps[-1].plain_peak_bytes)
    # Gradients that are parts of the buckets take no more.
    assert peaks_bytes[0] - peaks_bytes[1] >= 0.9 * trained_bytes(Words())
