"""A small reference Llama, its batch, and the graph of one of its units."""

import torch
from torch import Tensor

from recollect.lab.models.architectures import llama_config
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.gpt import GPTModel
from recollect.profile.graph import UnitGraph
from recollect.profile.profile import Profile

SMALL = llama_config(num_layers=4, hidden_size=64, num_attention_heads=4, num_query_groups=2, vocab_size=128)


def llama(config: TransformerConfig = SMALL) -> GPTModel:
    torch.manual_seed(0)
    return GPTModel(config)


def batch_of(config: TransformerConfig = SMALL, sequences: int = 4, length: int = 32) -> dict[str, Tensor]:
    tokens = torch.zeros(sequences, length, dtype=torch.int64).random_(config.vocab_size)
    return {"tokens": tokens, "labels": tokens.clone()}


def llama_step(sequences: int = 2, length: int = 16, **sizes: int) -> tuple[GPTModel, dict[str, Tensor]]:
    """A Llama of two layers, or of other sizes, and its batch."""
    config = llama_config(**{"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 64, **sizes})
    return llama(config), batch_of(config, sequences, length)


def graph_at(profile: Profile, path: str) -> UnitGraph:
    return next(profile.graph_of(call) for call in profile.calls if call.path == path)
