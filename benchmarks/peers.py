"""Recompute by hand, as people set it up today with `torch.utils.checkpoint`: the peers that recollect is compared with.

Each peer replaces the `forward` of some layers, all settings of `checkpoint` at their defaults unless its own library
sets them. A peer is written here from what it does, none of it is imported, so that all run in one process on one model.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Forward = Callable[..., Any]
Forwards = dict[nn.Module, Forward]


@dataclass(frozen=True)
class Peer:
    """A way to recompute. `forwards`: from the model's layers to the forwards that take the place of their own."""

    name: str
    what: str
    forwards: Callable[[Sequence[nn.Module]], Forwards]


def _aten(*names: str) -> frozenset[Any]:
    """The overloads of these names that this version of PyTorch has."""
    packets = (getattr(torch.ops.aten, name, None) for name in names)
    return frozenset(packet.default for packet in packets if packet is not None)


MATMUL = _aten("mm", "addmm", "bmm")
LINEAR = _aten("mm", "linear")
ATTENTION = _aten(
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
    # What the names above are on CUDA, on a CPU. torchtitan does not list it, because nobody trains with it there.
    "_scaled_dot_product_flash_attention_for_cpu",
)
# torchtitan b5bcd76c66, distributed/activation_checkpoint.py: `compute_intensive_ops` of PyTorch's partitioner, and what
# that file adds to it. Collectives and compiled regions do not occur here.
TORCHTITAN = (
    MATMUL
    | LINEAR
    | ATTENTION
    | _aten("_scaled_mm", "convolution", "convolution_backward", "upsample_bilinear2d", "max", "topk")
)


def full(layers: Sequence[nn.Module], *, every: int = 1, use_reentrant: bool = False) -> Forwards:
    """Checkpoint each layer whose index is a multiple of `every`, as Hugging Face's `every_n_layers` does."""
    return {
        layer: functools.partial(checkpoint, layer.forward, use_reentrant=use_reentrant) for layer in layers[::every]
    }


def sqrt_segments(layers: Sequence[nn.Module]) -> Forwards:
    """Checkpoint segments of sqrt(n) layers each; the last one runs plain, as in `checkpoint_sequential`."""
    length = max(1, round(math.sqrt(len(layers))))
    starts = range(0, len(layers), length)
    forwards: Forwards = {}
    for start in starts[:-1]:
        segment = [layer.forward for layer in layers[start : start + length]]
        forwards[layers[start]] = functools.partial(checkpoint, _chained(segment), use_reentrant=False)
        forwards.update(dict.fromkeys(layers[start + 1 : start + length], _pass_on))
    return forwards


def _chained(segment: Sequence[Forward]) -> Forward:
    """Run layers one after the other; what else they take (positions, a mask) is the same for all."""

    def forward(x: Any, *args: Any, **kwargs: Any) -> Any:
        for layer_forward in segment:
            x = layer_forward(x, *args, **kwargs)
        return x

    return forward


def _pass_on(x: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand in for a layer that the segment before has run already."""
    return x


def selective(layers: Sequence[nn.Module], save: Iterable[Any]) -> Forwards:
    """Selective checkpoint of each layer that saves what these ops return."""
    context_fn = functools.partial(create_selective_checkpoint_contexts, list(save))
    return {
        layer: functools.partial(checkpoint, layer.forward, use_reentrant=False, context_fn=context_fn)
        for layer in layers
    }


def every_other_matmul(layers: Sequence[nn.Module], save: frozenset[Any], *, early_stop: bool = True) -> Forwards:
    """Selective checkpoint of each layer that saves what these ops return, but only the first of each two matmuls."""

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(_skipping_policy(save))

    return {
        layer: functools.partial(
            checkpoint, layer.forward, use_reentrant=False, context_fn=contexts, early_stop=early_stop
        )
        for layer in layers
    }


def _skipping_policy(save: frozenset[Any]) -> Callable[..., CheckpointPolicy]:
    # Up to torch 2.12 the policy is asked in recompute too, where it has to count on its own.
    counts = {False: itertools.count(1), True: itertools.count(1)}

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op not in save or (op in LINEAR and next(counts[ctx.is_recompute]) % 2 == 0):
            return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE

    return policy


PEERS = (
    Peer("full", "checkpoint of every layer", full),
    Peer("every 2nd layer", "Hugging Face every_n_layers=2", functools.partial(full, every=2)),
    Peer("every 4th layer", "Hugging Face every_n_layers=4", functools.partial(full, every=4)),
    Peer("sqrt segments", "checkpoint of sqrt(n) layers at a time", sqrt_segments),
    Peer("SAC attention", "saves attention", functools.partial(selective, save=ATTENTION)),
    Peer(
        "SAC 2nd matmul",
        "saves attention and every other matmul",
        functools.partial(every_other_matmul, save=MATMUL | LINEAR | ATTENTION),
    ),
    Peer(
        "torchtitan SAC",
        "its list and its rule: every other matmul, no early stop",
        functools.partial(every_other_matmul, save=TORCHTITAN, early_stop=False),
    ),
    Peer("SAC matmuls", "saves attention and all matmuls", functools.partial(selective, save=MATMUL | ATTENTION)),
)
