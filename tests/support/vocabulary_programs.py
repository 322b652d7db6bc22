"""What two processes run in the tests of the chunked loss whose LM head is split over them along the vocabulary."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import recollect
from recollect.errors import RecollectError

TOKENS, WIDTH, WORDS = 10, 12, 46
OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "smoothed": {"label_smoothing": 0.1},
    "softcapped": {"transform": lambda logits: 2 * torch.tanh(logits / 2)},
}
# Of one step of one chunk, and of tokens many enough for what is alive once to count.
MANY_TOKENS, MANY_WORDS, MANY_CHUNKS = 256, 4096, 8


def case(words: int = WORDS, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Hidden states, weight, bias and labels, the same on all ranks."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, TOKENS, WIDTH), (words, WIDTH), (words,)]
    hidden, weight, bias = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    labels = torch.randint(words, (2, TOKENS), generator=generator)
    labels[0, :3] = -100
    return [hidden, weight, bias, labels]


def plain(words: int, options: dict[str, Any]) -> list[Tensor]:
    """The loss, and the gradients of hidden states, weight and bias, in one process."""
    *leaves, labels = case(words)
    hidden, weight, bias = (leaf.requires_grad_() for leaf in leaves)
    transform = options.get("transform", lambda logits: logits)
    others = {name: value for name, value in options.items() if name != "transform"}
    loss = F.cross_entropy(transform(F.linear(hidden, weight, bias)).flatten(0, 1), labels.flatten(), **others)
    return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight, bias))]


def farthest(words: int, options: dict[str, Any], *, hidden_layout: Any, as_parts: bool) -> float:
    """How far the chunked loss of all ranks is from the plain one, and its gradients."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    *leaves, labels = case(words)
    hidden, weight, bias = (
        distribute_tensor(leaf, mesh, [layout])
        for leaf, layout in zip(leaves, (hidden_layout, Shard(0), Shard(0)), strict=True)
    )
    if as_parts:
        hidden, weight, bias = (tensor.to_local() for tensor in (hidden, weight, bias))
    leaves = [leaf.detach().requires_grad_() for leaf in (hidden, weight, bias)]
    loss = recollect.chunked_cross_entropy(
        leaves[0], leaves[1], labels, num_chunks=3, bias=leaves[2], group=mesh.get_group(), **options
    )
    got = torch.autograd.grad(loss, leaves)
    if as_parts:
        got = tuple(
            DTensor.from_local(one, mesh, [layout])
            for one, layout in zip(got, (Replicate(), Shard(0), Shard(0)), strict=True)
        )
    found = [loss.detach(), *(one.full_tensor() for one in got)]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, plain(words, options), strict=True))


def exactness() -> Iterator[tuple[str, Any]]:
    for name, options in OPTIONS.items():
        yield f"farthest {name}, parts", farthest(WORDS, options, hidden_layout=Replicate(), as_parts=True)
        for layout in (Replicate(), Shard(1)):
            found = farthest(WORDS, options, hidden_layout=layout, as_parts=False)
            yield f"farthest {name}, {layout}", found
    # The last rank has a word less.
    yield "farthest uneven", farthest(WORDS - 1, OPTIONS["smoothed"], hidden_layout=Shard(1), as_parts=False)


def peaks() -> Iterator[tuple[str, Any]]:
    hidden = torch.randn(MANY_TOKENS, WIDTH)
    labels = torch.randint(MANY_WORDS * dist.get_world_size(), (MANY_TOKENS,))
    for needs_gradients in (False, True):
        weight = nn.Parameter(torch.randn(MANY_WORDS, WIDTH), requires_grad=needs_gradients)
        peak = recollect.measure_peak(
            lambda weight=weight: recollect.chunked_cross_entropy(
                hidden, weight, labels, num_chunks=MANY_CHUNKS, group=dist.group.WORLD
            )
        )
        yield f"peak {needs_gradients}", peak.peak_growth_bytes


def refusals() -> Iterator[tuple[str, Any]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    hidden, weight, bias, labels = case()
    rows = distribute_tensor(weight, mesh, [Shard(0)])
    cases: dict[str, tuple[Tensor, Tensor, Any]] = {
        "no group": (hidden, rows, None),
        "split by columns": (hidden, distribute_tensor(weight, mesh, [Shard(1)]), dist.group.WORLD),
        "split by channels": (distribute_tensor(hidden, mesh, [Shard(2)]), rows, dist.group.WORLD),
        "one word": (hidden, distribute_tensor(weight[:1], mesh, [Shard(0)]), dist.group.WORLD),
    }
    for name, (x, w, group) in cases.items():
        try:
            recollect.chunked_cross_entropy(x, w, labels, num_chunks=2, group=group)
        except RecollectError as error:
            yield f"refused {name}", str(error)
    labels[1, 1] = WORDS
    found = recollect.chunked_cross_entropy(hidden, rows, labels, num_chunks=2, group=dist.group.WORLD)
    yield "beyond the vocabulary", found.item()


def vocabulary_cases() -> dict[str, Any]:
    return {**dict(exactness()), **dict(peaks()), **dict(refusals())}
