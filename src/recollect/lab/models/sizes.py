"""Named model sizes: published ones, and small ones that train on a CPU. Imports no torch: `--help` must be quick."""

from collections.abc import Callable
from typing import Any

from recollect.lab.models.architectures import deepseek_v3_config, gpt_config, llama_config, mixtral_config
from recollect.lab.models.config import TransformerConfig


def _llama(
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    groups: int = 0,
    *,
    kind: Callable[..., TransformerConfig] = llama_config,
    **fields: Any,
) -> TransformerConfig:
    sizes = {"num_layers": layers, "hidden_size": hidden, "ffn_hidden_size": ffn, "vocab_size": 32_000}
    return kind(**{**sizes, "num_attention_heads": heads, "num_query_groups": groups, **fields})


def _gpt(layers: int, hidden: int, heads: int, **fields: Any) -> TransformerConfig:
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": 50_257}
    return gpt_config(**{**sizes, **fields})


# Published models, with their sources. The sequence length is part of a size only for "7b-32k".
_PUBLISHED: dict[str, TransformerConfig] = {
    "160m": _llama(12, 768, 3072, 12, 12),  # JackFram/llama-160m
    "1b": _llama(22, 2048, 5632, 32, 4),  # TinyLlama-1.1B
    "7b": _llama(32, 4096, 11_008, 32, 32, max_position_embeddings=4096),  # Llama 2, arXiv 2307.09288; 13b and 70b too
    "7b-32k": _llama(32, 4096, 11_008, 32, 32, max_position_embeddings=32_768),  # 7b, for sequences of 32,768 tokens
    "8b": _llama(  # Llama 3, arXiv 2407.21783
        32, 4096, 14_336, 32, 8, vocab_size=128_256, rotary_base=500_000.0, max_position_embeddings=8192
    ),
    "13b": _llama(40, 5120, 13_824, 40, 40, max_position_embeddings=4096),
    "70b": _llama(80, 8192, 28_672, 64, 8, max_position_embeddings=4096),
    "gpt2": _gpt(12, 768, 12, max_position_embeddings=1024),  # Radford et al. 2019
    "gpt3-175b": _gpt(96, 12_288, 96),  # Brown et al. 2020, arXiv 2005.14165, table 2.1
    "mixtral-8x7b": _llama(  # arXiv 2401.04088, table 1; base and auxiliary loss from the released config
        32, 4096, 14_336, 32, 8, kind=mixtral_config, rotary_base=1e6, max_position_embeddings=32_768
    ),
    "deepseek-v3-671b": _llama(  # arXiv 2412.19437, section 4.2; group sizes from the released config
        *(61, 7168, 18_432, 128),
        kind=deepseek_v3_config,
        vocab_size=129_280,
        max_position_embeddings=4096,
        num_moe_experts=256,
        moe_router_topk=8,
        moe_router_num_groups=8,
        moe_router_group_topk=4,
        moe_router_topk_scaling_factor=2.5,
        moe_ffn_hidden_size=2048,
        moe_shared_expert_intermediate_size=2048,
        moe_layer_freq=[0] * 3 + [1] * 58,
        q_lora_rank=1536,
    ),
}

# Our own: bytes as tokens, small enough for tests and for two CPU cores.
_SMALL: dict[str, TransformerConfig] = {
    "demo": _llama(8, 256, 704, 4, 2, vocab_size=256),
    "tiny": _llama(2, 64, 192, 4, 2, vocab_size=256),
    "gpt-tiny": _gpt(4, 64, 4, vocab_size=256, max_position_embeddings=256),
    "llama-tiny": _llama(4, 64, 192, 4, 2, vocab_size=256),
    "mixtral-tiny": _llama(4, 64, 128, 4, 2, kind=mixtral_config, vocab_size=256),
    "deepseek-v3-tiny": _llama(
        *(4, 64, 192, 4),
        kind=deepseek_v3_config,
        vocab_size=256,
        num_moe_experts=16,
        moe_router_topk=4,
        moe_router_num_groups=4,
        moe_router_group_topk=2,
        moe_router_topk_scaling_factor=2.5,
        moe_ffn_hidden_size=32,
        moe_shared_expert_intermediate_size=64,
        moe_layer_freq=[0, 1, 1, 1],
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_head_dim=16,
        qk_pos_emb_head_dim=8,
        v_head_dim=16,
    ),
}

NAMED_CONFIGS: dict[str, TransformerConfig] = {**_SMALL, **_PUBLISHED}
