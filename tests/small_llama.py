"""A small reference Llama, its batch, and the graph of one of its units."""

from __future__ import annotations

import torch
from torch import Tensor

from recollect.models.llama import Llama
from recollect.models.sizes import LlamaConfig
from recollect.profile.graph import Profile, UnitGraph

SMALL = LlamaConfig(num_layers=4, hidden_size=64, num_heads=4, num_kv_heads=2, vocab_size=128)


def llama(config: LlamaConfig = SMALL) -> Llama:
    torch.manual_seed(0)
    return Llama(config)


def batch_of(config: LlamaConfig = SMALL, sequences: int = 4, length: int = 32) -> dict[str, Tensor]:
    tokens = torch.zeros(sequences, length, dtype=torch.int64).random_(config.vocab_size)
    return {"tokens": tokens, "labels": tokens.clone()}


def graph_at(profile: Profile, path: str) -> UnitGraph:
    return next(profile.graph_of(call) for call in profile.calls if call.path == path)
