"""A small Llama in every layout that PyTorch can give it, for `layouts.py` and the tests.

Each layout is built as its users build it, from public names of PyTorch, and knows nothing of recollect.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh, init_device_mesh
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.nn import functional as collectives
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

__all__ = ["LAYOUTS", "Layout", "Llama", "batch", "loss_of"]

WIDTH, HEADS, INNER, VOCABULARY, LENGTH, SEQUENCES = 32, 4, 64, 64, 32, 4
HEAD_WIDTH = WIDTH // HEADS


class Attention(nn.Module):
    """Causal attention over the heads that its matrices hold. [b, s, d] -> [b, s, d]; keys may come from all ranks."""

    def __init__(self, *, gathers: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gathers = gathers

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, d] -> [b, s, d]."""
        queries, keys, values = (
            part(hidden).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        if self.gathers:
            keys, values = (torch.cat(collectives.all_gather(part), dim=2) for part in (keys, values))
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=not self.gathers)
        output: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return output


class MLP(nn.Module):
    """Gated feed-forward layer. [b, s, d] -> [b, s, d]."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, d] -> [b, s, d]."""
        output: Tensor = self.down(self.dropout(functional.silu(self.gate(hidden)) * self.up(hidden)))
        return output


class Experts(nn.Module):
    """One expert a rank, and tokens sent to them, as many to each as the router wants. [b, s, d] -> [b, s, d]."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, dist.get_world_size(), bias=False)
        self.expert = MLP(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, d] -> [b, s, d]."""
        tokens = hidden.flatten(0, -2)
        weights, choice = self.router(tokens).softmax(-1).max(-1)
        order = choice.argsort()
        sent = torch.bincount(choice, minlength=dist.get_world_size())
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        counts = [sent.tolist(), received.tolist()]
        arrived = exchanged(tokens[order], *counts)
        returned = exchanged(self.expert(arrived), *reversed(counts))
        mixed = torch.empty_like(tokens).index_copy(0, order, returned) * weights.unsqueeze(-1)
        return mixed.view_as(hidden)


def exchanged(tokens: Tensor, sent: list[int], received: list[int]) -> Tensor:
    """Send rows to all ranks, as many to each as `sent` says."""
    space = tokens.new_empty(sum(received), tokens.shape[1])
    output: Tensor = collectives.all_to_all_single(space, tokens, received, sent)
    return output


class Layer(nn.Module):
    """Attention and feed-forward, each with a norm before it and a residual around it. [b, s, d] -> [b, s, d]."""

    def __init__(self, dropout: float, *, gathers: bool, has_experts: bool) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention(gathers=gathers)
        self.mlp = Experts(dropout) if has_experts else MLP(dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, d] -> [b, s, d]."""
        hidden = hidden + self.dropout(self.attention(self.norm_1(hidden)))
        output: Tensor = hidden + self.dropout(self.mlp(self.norm_2(hidden)))
        return output


class Llama(nn.Module):
    """Tokens [b, s] to logits [b, s, v]."""

    def __init__(
        self, num_layers: int = 4, dropout: float = 0.1, *, gathers: bool = False, has_experts: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(dropout, gathers=gathers, has_experts=has_experts) for _ in range(num_layers))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """[b, s] -> [b, s, v]."""
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def batch(*, same_on_all_ranks: bool = False) -> Tensor:
    """Tokens [b, s]: of this rank, or the same on all."""
    generator = torch.Generator().manual_seed(100 + (0 if same_on_all_ranks else dist.get_rank()))
    return torch.randint(VOCABULARY, (SEQUENCES, LENGTH), generator=generator)


def loss_of(logits: Any) -> Tensor:
    """Cross-entropy against targets that need no second batch; also for logits that are split over the ranks."""
    targets = (torch.arange(logits.shape[0] * logits.shape[1]) * 7 % VOCABULARY).view(logits.shape[:2])
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Layout:
    """How a model is spread over ranks.

    Attributes:
        world_size: ranks.
        build: makes the model, already wrapped.
        same_batch: whether all ranks work on one batch.
        around: in what the step has to run.
        reshards: whether parameters are freed after forward, so that a plan has to keep what units return.
        has_functional_collectives: whether layers run collectives that can run again.
    """

    world_size: int
    build: Callable[[], nn.Module]
    same_batch: bool = False
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    reshards: bool = False
    has_functional_collectives: bool = False

    def batch(self) -> Tensor:
        """Return this rank's batch."""
        return batch(same_on_all_ranks=self.same_batch)


def made(**settings: Any) -> Llama:
    """Return the same model on every rank."""
    torch.manual_seed(0)
    return Llama(**settings)


def sharded(model: nn.Module, mesh: DeviceMesh | None = None, **settings: Any) -> nn.Module:
    """Shard every layer, and then the rest, with FSDP2."""
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def replicated(**settings: Any) -> nn.Module:
    """Return the model under DDP; on the fake group, whose collectives promise no result to DDP, with a hook that has one."""
    model = DistributedDataParallel(made(), **settings)
    if dist.get_backend() == "fake":
        model.register_comm_hook(None, noop_hook)
    return model


def tensor_parallel(
    mesh: DeviceMesh, *, sequence: bool = False, splits_loss: bool = False, **settings: Any
) -> nn.Module:
    """Split matrices over a mesh; with `sequence`, what is between them along the sequence; with `splits_loss`, logits."""
    model = made(**settings)
    between = Shard(1) if sequence else Replicate()
    for layer in model.layers:
        styles: dict[str, Any] = {
            **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
            "attention.o": RowwiseParallel(output_layouts=between),
            "mlp.gate": ColwiseParallel(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=between),
        }
        if sequence:
            whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
            styles |= {"norm_1": SequenceParallel(), "norm_2": SequenceParallel(), "attention": whole, "mlp": whole}
        parallelize_module(layer, mesh, styles)
    ends: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(
            input_layouts=between,
            output_layouts=Shard(-1) if splits_loss else Replicate(),
            use_local_output=not splits_loss,
        ),
    }
    if sequence:
        ends["norm"] = SequenceParallel()
    return parallelize_module(model, mesh, ends)


def grid() -> DeviceMesh:
    """Two by two ranks."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))


def line() -> DeviceMesh:
    """Two ranks."""
    return init_device_mesh("cpu", (2,))


def both(*, sequence: bool) -> nn.Module:
    """Tensor parallel within FSDP2."""
    mesh = grid()
    return sharded(tensor_parallel(mesh["tensor"], sequence=sequence), mesh["data"])


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

LAYOUTS: dict[str, Layout] = {
    "one process": Layout(1, made),
    "DDP": Layout(2, replicated),
    "DDP, bucket views": Layout(2, lambda: replicated(gradient_as_bucket_view=True, static_graph=True)),
    "FSDP2": Layout(2, lambda: sharded(made()), reshards=True),
    "FSDP2 in bf16": Layout(2, lambda: sharded(made(), mp_policy=BF16), reshards=True),
    "FSDP2 to 2 of 4": Layout(4, lambda: sharded(made(), reshard_after_forward=2), reshards=True),
    "FSDP2, kept gathered": Layout(2, lambda: sharded(made(), reshard_after_forward=False)),
    "HSDP": Layout(4, lambda: sharded(made(), grid()), reshards=True),
    "TP": Layout(2, lambda: tensor_parallel(line()), same_batch=True, has_functional_collectives=True),
    "TP+SP": Layout(
        2, lambda: tensor_parallel(line(), sequence=True), same_batch=True, has_functional_collectives=True
    ),
    "TP, loss parallel": Layout(
        2,
        lambda: tensor_parallel(line(), splits_loss=True),
        same_batch=True,
        around=loss_parallel,
        has_functional_collectives=True,
    ),
    "TP+SP, loss parallel": Layout(
        2,
        lambda: tensor_parallel(line(), sequence=True, splits_loss=True),
        same_batch=True,
        around=loss_parallel,
        has_functional_collectives=True,
    ),
    "FSDP2+TP": Layout(4, lambda: both(sequence=False), reshards=True, has_functional_collectives=True),
    "FSDP2+TP+SP": Layout(4, lambda: both(sequence=True), reshards=True, has_functional_collectives=True),
    "context parallel": Layout(2, lambda: made(gathers=True)),
    "expert parallel": Layout(2, lambda: made(has_experts=True)),
}
