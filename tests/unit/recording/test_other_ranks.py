"""Recordings of one of several ranks: what communicates runs once, and buckets, buffers and copies of gradients count once."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed._functional_collectives import all_reduce
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


def test_those_that_replicate_has_not_made_yet_count() -> None:
    model = Words()
    replicate(model, ignored_modules=[model.head])
    profile = recollect.record(model, torch.randint(20, (2, 4)), fake=True)
    assert profile.persistent["communication_buckets"] == trained_bytes(model) - trained_bytes(model.head)


def test_sparse_gradients_have_none_and_unused_parameters_a_map() -> None:
    model = Words(sparse=True)
    sizes = GradientBuckets(
        DistributedDataParallel(model, find_unused_parameters=True), may_communicate=True
    ).sizes_bytes
    num_parameters = len(list(model.parameters()))
    assert sum(sizes) == trained_bytes(model) - model.embedding.weight.nbytes + 8 * num_parameters


def planned(*, views: bool, lengths: Sequence[int]) -> list[Any]:
    """What a loop recorded, at its first step and where it grew, which reads gradients outside of forward and backward."""
    torch.manual_seed(0)
    words = torch.randint(20, (2, 1))
    model = replicated(Words(), gradient_as_bucket_view=views, bucket_cap_mb=0.0002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recollect.attach(model, optimizer, "1MiB", log=lambda line: None) as attached:
        for length in lengths:
            model(words.expand(2, length)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            # So that they are there when the last step is recorded.
            optimizer.zero_grad(set_to_none=False)
    return attached.planned


# From the second step on there are several, in place of one of all gradients.
@pytest.mark.parametrize("lengths", [(4, 6), (4, 4, 6)], ids=["as they change", "later"])
def test_profiles_count_them_once(lengths: Sequence[int]) -> None:
    peaks_bytes = []
    for views in (False, True):
        steps = planned(views=views, lengths=lengths)
        for persistent in (step.profile.persistent for step in steps):
            assert persistent["communication_buckets"] == trained_bytes(Words())
            assert persistent.get("other_tensors", 0) < 256
            assert persistent.get("other_allocations", 0) < 256
        peaks_bytes.append(steps[-1].plain_peak_bytes)
    # Gradients that are parts of the buckets take no more.
    assert peaks_bytes[0] - peaks_bytes[1] >= 0.9 * trained_bytes(Words())


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


@pytest.mark.parametrize("communicates", ["", "forward", "backward", "functional"])
def test_a_unit_that_communicates_runs_once(communicates: str) -> None:
    model = nn.Sequential(*(Layer(communicates) for _ in range(3)))
    Layer.num_runs = 0
    profile = recollect.record(model, torch.randn(8, 16, requires_grad=True), loss_fn=torch.sum)
    assert len(profile.calls) == 3
    assert Layer.num_runs == 3


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="an older Dynamo does not trace the counter of the layer")
def test_what_a_loop_communicates_after_backward_is_of_no_unit() -> None:
    model = nn.Sequential(*(Layer("") for _ in range(3)))

    def step() -> None:
        model(torch.randn(8, 16, requires_grad=True)).sum().backward()
        all_reduce(torch.stack([parameter.grad.norm() for parameter in model.parameters()]), "sum", dist.group.WORLD)

    profile = recollect.record(model, step=step, engine="graph")
    assert all(profile.graph_of(call).joint for call in profile.calls), [g.why_not_traced for g in profile.graphs]


def _collect(parameter: Any) -> None:
    parameter.main_grad.add_(parameter.grad)
    parameter.grad = None


def test_they_have_names_and_the_copies_gradients_are_gone_in_forward() -> None:
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))
    ).bfloat16()
    parameters: list[Any] = list(model.parameters())
    for parameter in parameters:
        parameter.main_grad, parameter.main_param = torch.zeros_like(parameter), parameter.detach().float()
        parameter.register_post_accumulate_grad_hook(_collect)
    optimizer = torch.optim.SGD([parameter.main_param for parameter in parameters], lr=1e-3)
    attached = recollect.attach(model, optimizer, "95%", measure=True, log=lambda line: None)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(256, 64, dtype=torch.bfloat16)).sum().backward()
        for parameter in parameters:
            parameter.main_param.grad = parameter.main_grad.float()
        optimizer.step()
        for parameter in parameters:
            parameter.data.copy_(parameter.main_param)
    (planned,) = attached.planned
    nbytes = sum(parameter.nbytes for parameter in parameters)
    found = planned.profile.persistent
    assert [found[kind] for kind in ("parameters", "gradient_buffers", "master_weights")] == [
        nbytes,
        nbytes,
        2 * nbytes,
    ]
    assert planned.measured_bytes <= planned.peak_bytes < planned.measured_bytes + nbytes
