"""Measures what it takes to gather values of which each rank holds a part."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from recollect._torch_parallel import gathered
from recollect.costs.op_costs import timed_alone
from recollect.engine.sharded_keep import shards_of

__all__ = ["gather_facts"]

_SMALL_BYTES, _LARGE_BYTES = 64, 1 << 22
_NUM_SAMPLES: Final = 5


def gather_facts(model: nn.Module, device: torch.device, *, fake: bool) -> dict[str, Any]:
    """Return the fields of the profile about values that are held as parts; all ranks of the group have to ask together.

    Without devices (`fake`) there is nothing to measure, and gathering counts as free.
    """
    shards = shards_of(model)
    if shards is None:
        return {}
    facts: dict[str, Any] = {"shard_ranks": shards.size}
    if fake:
        return facts
    seconds = []
    for nbytes in (_SMALL_BYTES, _LARGE_BYTES):
        part = torch.zeros(nbytes // shards.size + 1, dtype=torch.uint8, device=device)
        gather = partial(gathered, part, shards.size, shards.name)
        seconds.append(statistics.median(timed_alone(gather, device)[1] for _ in range(_NUM_SAMPLES)))
    small_s, large_s = seconds
    return {
        **facts,
        "gather_latency_s": small_s,
        "gather_s_per_byte": max(0.0, large_s - small_s) / (_LARGE_BYTES - _SMALL_BYTES),
    }
