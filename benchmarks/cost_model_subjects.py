"""Five models whose step `cost_model.py` measures: dense, routed, with latent attention, with dropout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
import transformers
from torch import nn

from recollect.models.llama import Llama, LlamaConfig

_HEAD_WIDTH = 64


class Sizes(Protocol):
    """What the models are built from; see the flags of `cost_model.py`."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    batch_size: int
    seq_length: int
    dtype: str
    seed: int


def subjects(sizes: Sizes) -> Iterator[tuple[str, nn.Module, dict[str, torch.Tensor]]]:
    """Yield (name, model in training mode, batch), randomly initialised."""
    width, layers, vocabulary = sizes.hidden_size, sizes.num_layers, sizes.vocab_size
    heads = max(2, width // _HEAD_WIDTH)
    own = LlamaConfig(vocab_size=vocabulary, hidden_size=width, num_layers=layers, num_heads=heads)
    common: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": width * 11 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "pad_token_id": 0,
    }
    grouped = {**common, "num_key_value_heads": heads // 2}
    latent = {
        **common,
        "num_key_value_heads": heads,
        "moe_intermediate_size": width,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": width // 4,
        "q_lora_rank": width // 2,
        "qk_rope_head_dim": _HEAD_WIDTH // 2,
        "qk_nope_head_dim": _HEAD_WIDTH,
        "v_head_dim": _HEAD_WIDTH,
    }
    gpt2 = transformers.GPT2Config(
        vocab_size=vocabulary, n_embd=width, n_layer=layers, n_head=heads, bos_token_id=0, eos_token_id=0
    )
    builders = {
        "reference Llama": lambda: Llama(own),
        "HF Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**grouped)),
        "Mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**grouped, num_local_experts=4)),
        "DeepSeek-V3": lambda: transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**latent)),
        "GPT-2 (dropout)": lambda: transformers.GPT2LMHeadModel(gpt2),
    }
    for name, build in builders.items():
        torch.manual_seed(sizes.seed)
        model = build().to(torch.bfloat16 if sizes.dtype == "bf16" else torch.float32).train()
        tokens = torch.randint(0, vocabulary, (sizes.batch_size, sizes.seq_length))
        yield name, model, {"tokens" if isinstance(model, Llama) else "input_ids": tokens, "labels": tokens}
