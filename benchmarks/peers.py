"""Recompute set up by hand, layer by layer, as is common today: the peers that recollect is compared with.

Hugging Face's schedules use its own switch. The others are reimplemented here, with all settings of
`torch.utils.checkpoint` at their defaults unless their library sets them, so that all run in one process on one model.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from recompute import Forward, Forwards, HuggingFace, Recompute, Replaced
from subject import Step


@dataclass(frozen=True)
class Peer:
    """A way to recompute; `recompute` makes it for a step, and may raise, which is reported with the results."""

    name: str
    what: str
    recompute: Callable[[Step], Recompute]


def aten(*names: str) -> frozenset[Any]:
    """Return the default overloads of ops that exist in this version of PyTorch."""
    packets = (getattr(torch.ops.aten, name, None) for name in names)
    return frozenset(packet.default for packet in packets if packet is not None)


MATMUL = aten("mm", "addmm", "bmm")
LINEAR = aten("mm", "linear")
GROUPED = aten("_grouped_mm")
ATTENTION = aten(
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
    # The CPU's counterpart of the above; torchtitan does not list it, because nobody trains with it on a CPU.
    "_scaled_dot_product_flash_attention_for_cpu",
)
# torchtitan b5bcd76c66, distributed/activation_checkpoint.py: `compute_intensive_ops` of PyTorch's partitioner, and what
# that file adds to it. Collectives, compiled regions and its names for a router's gate do not occur here.
TORCHTITAN = (
    MATMUL
    | LINEAR
    | ATTENTION
    | aten("_scaled_mm", "convolution", "convolution_backward", "upsample_bilinear2d", "max", "topk")
)


def full(layers: Sequence[nn.Module], *, every: int = 1, use_reentrant: bool = False) -> Forwards:
    """Checkpoint each layer whose index is a multiple of `every`, as Hugging Face's `every_n_layers` does."""
    return {
        layer: functools.partial(checkpoint, layer.forward, use_reentrant=use_reentrant) for layer in layers[::every]
    }


def every_nth(step: Step, *, every: int) -> Recompute:
    """Checkpoint every nth layer, by the model's own switch if it is a Hugging Face model."""
    if HuggingFace.is_switch_of(step.model):
        return HuggingFace(step.model, every)
    return Replaced(full(list(step.layers.values()), every=every))


def uniform(layers: Sequence[nn.Module], *, length: int) -> Forwards:
    """Checkpoint regions of `length` layers, as Megatron's `uniform`; the last one may be shorter."""
    forwards: dict[nn.Module, Forward] = {}
    for start in range(0, len(layers), length):
        region = layers[start : start + length]
        chained = _chained([layer.forward for layer in region])
        forwards[region[0]] = functools.partial(checkpoint, chained, use_reentrant=False)
        forwards.update(dict.fromkeys(region[1:], _pass_on))
    return forwards


def _chained(region: Sequence[Forward]) -> Forward:
    """Return the forward of several layers in sequence; their other arguments (positions, mask) are the same."""

    def forward(x: Any, *args: Any, **kwargs: Any) -> Any:
        for layer_forward in region:
            x = layer_forward(x, *args, **kwargs)
        return x

    return forward


def _pass_on(x: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace the forward of a layer that its region has already run."""
    return x


def block(layers: Sequence[nn.Module], *, fraction: float) -> Forwards:
    """Checkpoint each of the first layers, and no others, as Megatron's `block`."""
    return full(layers[: max(1, round(fraction * len(layers)))])


def selective(layers: Sequence[nn.Module], save: Iterable[Any]) -> Forwards:
    """Checkpoint each layer selectively, saving the outputs of these ops."""
    context_fn = functools.partial(create_selective_checkpoint_contexts, list(save))
    return {
        layer: functools.partial(checkpoint, layer.forward, use_reentrant=False, context_fn=context_fn)
        for layer in layers
    }


def saving_some_matmuls(
    modules: Sequence[nn.Module],
    save: frozenset[Any],
    saves: Callable[[int], bool],
    *,
    matmul: frozenset[Any] = LINEAR,
    early_stop: bool = True,
) -> Forwards:
    """Checkpoint each module selectively, saving the outputs of these ops but only some matmuls, counted from 1."""

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(_counting_policy(save, saves, matmul))

    return {
        module: functools.partial(
            checkpoint, module.forward, use_reentrant=False, context_fn=contexts, early_stop=early_stop
        )
        for module in modules
    }


def _counting_policy(
    save: frozenset[Any], saves: Callable[[int], bool], matmul: frozenset[Any]
) -> Callable[..., CheckpointPolicy]:
    # Up to torch 2.12 the policy is also called in recompute, which needs its own count.
    counts = {False: itertools.count(1), True: itertools.count(1)}

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op not in save or (op in matmul and not saves(next(counts[ctx.is_recompute]))):
            return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE

    return policy


def every_other(number: int) -> bool:
    """Return whether a number is odd: the first, the third, ..."""
    return number % 2 == 1


def _of_layers(make: Callable[..., Forwards], **settings: Any) -> Callable[[Step], Recompute]:
    return lambda step: Replaced(make(list(step.layers.values()), **settings))


LAYER_PEERS = (
    Peer("full", "checkpoint of every layer (Hugging Face every_n_layers=1)", functools.partial(every_nth, every=1)),
    Peer("every 2nd layer", "Hugging Face every_n_layers=2", functools.partial(every_nth, every=2)),
    Peer("every 4th layer", "Hugging Face every_n_layers=4", functools.partial(every_nth, every=4)),
    Peer("uniform 2", "Megatron full, uniform: 2 layers a region", _of_layers(uniform, length=2)),
    Peer("uniform 4", "Megatron full, uniform: 4 layers a region", _of_layers(uniform, length=4)),
    Peer("block 1/4", "Megatron full, block: the first quarter of the layers", _of_layers(block, fraction=0.25)),
    Peer("block 3/4", "Megatron full, block: the first three quarters", _of_layers(block, fraction=0.75)),
    Peer("SAC attention", "saves attention", _of_layers(selective, save=ATTENTION)),
    Peer(
        "SAC 2nd matmul",
        "saves attention and every other matmul",
        _of_layers(
            saving_some_matmuls,
            save=MATMUL | LINEAR | GROUPED | ATTENTION,
            saves=every_other,
            matmul=LINEAR | GROUPED,
        ),
    ),
    Peer(
        "torchtitan SAC",
        "its list and its rule: every other matmul, no early stop",
        _of_layers(saving_some_matmuls, save=TORCHTITAN, saves=every_other, early_stop=False),
    ),
    Peer(
        "torchtitan SAC less topk",
        "for routers that write into what topk returned, which cannot be saved then",
        _of_layers(saving_some_matmuls, save=TORCHTITAN - aten("topk", "max"), saves=every_other, early_stop=False),
    ),
    Peer(
        "SAC matmuls",
        "saves attention and all matmuls",
        _of_layers(selective, save=MATMUL | LINEAR | GROUPED | ATTENTION),
    ),
)
_FOR_ROUTERS = {"torchtitan SAC less topk"}


def layer_peers(step: Step) -> list[Peer]:
    """Return the peers that apply to this model."""
    has_router = step.model_name == "moe"
    return [peer for peer in LAYER_PEERS if has_router or peer.name not in _FOR_ROUTERS]
