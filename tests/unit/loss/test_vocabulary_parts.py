"""The chunked loss of two ranks, each with a part of the vocabulary, against the loss of the whole."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rank_threads import run_on_threads
from recollect import chunked_cross_entropy
from recollect.ranks.group import Group

RANKS, WORDS, WIDTH = 2, 14, 6
pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs PyTorch with the gloo backend")


def case() -> list[Tensor]:
    """Hidden states, weight and bias of the whole vocabulary, and labels: each word once, and tokens that do not count."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 8, WIDTH), (WORDS, WIDTH), (WORDS,)]
    labels = torch.cat([torch.arange(WORDS), torch.full((2,), -100)]).reshape(2, 8)
    return [*(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes), labels]


def whole(**options: Any) -> list[Tensor]:
    """The loss, and the gradients of hidden states, weight and bias."""
    *leaves, labels = case()
    hidden, weight, bias = (leaf.requires_grad_() for leaf in leaves)
    loss = F.cross_entropy(F.linear(hidden, weight, bias).flatten(0, 1), labels.flatten(), **options)
    return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight, bias))]


@pytest.mark.parametrize(
    "options", [{}, {"reduction": "sum"}, {"label_smoothing": 0.1}], ids=["mean", "sum", "smoothed"]
)
def test_parts_of_the_vocabulary_have_the_loss_and_the_gradients_of_the_whole(options: dict[str, Any]) -> None:
    def of_part(_: Group) -> list[Tensor]:
        rank = dist.get_rank()
        hidden, weight, bias, labels = case()
        own = [hidden, weight.chunk(RANKS)[rank], bias.chunk(RANKS)[rank]]
        leaves = [tensor.clone().requires_grad_() for tensor in own]
        loss = chunked_cross_entropy(
            leaves[0], leaves[1], labels, num_chunks=3, bias=leaves[2], group=dist.group.WORLD, **options
        )
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    first, second = run_on_threads(of_part, RANKS)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    found = [*first[:2], *(torch.cat(parts) for parts in zip(first[2:], second[2:], strict=True))]
    for got, exact in zip(found, whole(**options), strict=True):
        assert torch.allclose(got, exact, rtol=1e-12, atol=1e-14)
