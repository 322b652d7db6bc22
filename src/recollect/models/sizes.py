"""Dimensions of Llama-style decoders, the published ones by name. Imports no torch: `--help` must be quick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from recollect.models.architectures import deepseek_v3_config, gpt_config, llama_config, mixtral_config
from recollect.models.config import TransformerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Dimensions of a Llama-style decoder.

    Args:
        vocab_size: number of token ids.
        hidden_size: width of the residual stream.
        num_layers: number of decoder layers.
        num_heads: query heads; must divide `hidden_size`, the quotient must be even (rotary pairs).
        num_kv_heads: key and value heads; must divide `num_heads`. 0: as many as `num_heads`.
        intermediate_size: width inside the feed-forward part. 0: 8/3 of `hidden_size`, up to a multiple of 64.
        rope_theta: base of the rotary frequencies.
        norm_eps: added to the mean square in RMSNorm.
        tie_embeddings: use the embedding matrix as the output matrix.

    Raises:
        ValueError: a dimension is not positive, or one that must divide another does not.

    Example:
        >>> SIZES["7b"].num_parameters
        6738415616
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int = 0
    intermediate_size: int = 0
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.num_kv_heads == 0:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if self.intermediate_size == 0:
            object.__setattr__(self, "intermediate_size", -(-8 * self.hidden_size // (3 * 64)) * 64)
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"LlamaConfig.{name}: got {getattr(self, name)}, expected at least 1.")
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"LlamaConfig.hidden_size: got {self.hidden_size}, expected a multiple of 2 * num_heads = "
                f"{2 * self.num_heads}, because rotary embedding turns pairs of channels."
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"LlamaConfig.num_kv_heads: got {self.num_kv_heads}, "
                f"expected a divisor of num_heads = {self.num_heads}."
            )

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def num_parameters(self) -> int:
        """Exact number of trainable parameters; a tied matrix counts once."""
        d, f = self.hidden_size, self.intermediate_size
        attention = 2 * d * d + 2 * d * self.num_kv_heads * self.head_dim
        layer = attention + 3 * d * f + 2 * d
        vocabulary = self.vocab_size * d * (1 if self.tie_embeddings else 2)
        return self.num_layers * layer + d + vocabulary


def _size(vocab: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
    )


# Sources: 160m is JackFram/llama-160m, 1b TinyLlama-1.1B, 7b, 13b and 70b Llama 2 (arXiv 2307.09288), 8b Llama 3
# (arXiv 2407.21783). tiny and demo are ours: bytes as tokens, small enough for tests and for two CPU cores.
SIZES: dict[str, LlamaConfig] = {
    "tiny": _size(256, 64, 192, 2, 4, 2),
    "demo": _size(256, 256, 704, 8, 4, 2),
    "160m": _size(32_000, 768, 3072, 12, 12, 12),
    "1b": _size(32_000, 2048, 5632, 22, 32, 4),
    "7b": _size(32_000, 4096, 11_008, 32, 32, 32),
    "8b": LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        rope_theta=500_000.0,
    ),
    "13b": _size(32_000, 5120, 13_824, 40, 40, 40),
    "70b": _size(32_000, 8192, 28_672, 80, 64, 8),
}


def _llama(layers: int, hidden: int, ffn: int, heads: int, groups: int, **fields: Any) -> TransformerConfig:
    return llama_config(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups,
        **{"vocab_size": 32_000, **fields},
    )


def _gpt(layers: int, hidden: int, heads: int, **fields: Any) -> TransformerConfig:
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": 50_257}
    return gpt_config(**{**sizes, **fields})


# What is published, with its source. A sequence length is not part of a size, except where it is the point of one.
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
    "mixtral-8x7b": mixtral_config(  # arXiv 2401.04088, table 1; base and auxiliary loss from the released config
        num_layers=32,
        hidden_size=4096,
        ffn_hidden_size=14_336,
        num_attention_heads=32,
        num_query_groups=8,
        vocab_size=32_000,
        rotary_base=1e6,
        max_position_embeddings=32_768,
    ),
    "deepseek-v3-671b": deepseek_v3_config(  # arXiv 2412.19437, section 4.2; group sizes from the released config
        num_layers=61,
        hidden_size=7168,
        ffn_hidden_size=18_432,
        num_attention_heads=128,
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

# Ours: bytes as tokens, small enough for tests and for two CPU cores.
_SMALL: dict[str, TransformerConfig] = {
    "demo": _llama(8, 256, 704, 4, 2, vocab_size=256),
    "tiny": _llama(2, 64, 192, 4, 2, vocab_size=256),
    "gpt-tiny": _gpt(4, 64, 4, vocab_size=256, max_position_embeddings=256),
    "llama-tiny": _llama(4, 64, 192, 4, 2, vocab_size=256),
    "mixtral-tiny": mixtral_config(
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        num_query_groups=2,
        vocab_size=256,
    ),
    "deepseek-v3-tiny": deepseek_v3_config(
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=192,
        num_attention_heads=4,
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
