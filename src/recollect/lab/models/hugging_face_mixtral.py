"""Mixtral in Hugging Face's words: its configuration, and where its weights stand.

Checkpoints hold every expert's three matrices on their own (`block_sparse_moe.experts.N.w1`, w1 the gate, w3 beside it, w2
after them); models of transformers 5 hold them stacked (`mlp.experts.gate_up_proj`). Both are read, the first is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from recollect.lab.models.architectures import mixtral_config
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.hugging_face_fields import DECODER_FIELDS, checked_fields, rotary_base_of, same_fields, wanted
from recollect.lab.models.hugging_face_parts import attention_rules, decoder_rules
from recollect.lab.models.weight_rules import Layout, WeightRule, rename

__all__ = ["mixtral_from_hugging_face", "mixtral_rules", "mixtral_to_hugging_face"]

# Ours, and theirs where it means the same.
_SAME = {
    **DECODER_FIELDS,
    "num_query_groups": "num_key_value_heads",
    "num_moe_experts": "num_local_experts",
    "moe_router_topk": "num_experts_per_tok",
}
# What a Mixtral of ours cannot be told.
_FIXED = {"hidden_act": "silu", "sliding_window": None, "router_jitter_noise": 0.0}
# MixtralConfig's, where a file leaves a field out.
_DEFAULTS = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32_000,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def mixtral_from_hugging_face(fields: Mapping[str, Any]) -> TransformerConfig:
    """Read a `config.json`.

    Args:
        fields: its content.

    Returns:
        Our configuration. Their auxiliary loss is counted otherwise and off by default; ours keeps its own coefficient.

    Raises:
        UnsupportedModelError: a field asks for something that no model of ours does.

    Example:
        >>> config = mixtral_from_hugging_face({"num_hidden_layers": 2, "rope_theta": 1e6})
        >>> config.num_moe_experts, config.rotary_base
        (8, 1000000.0)
    """
    wanted(fields, _FIXED)
    ours = same_fields(fields, _SAME, _DEFAULTS)
    ours["kv_channels"] = fields.get("head_dim") or 0
    return mixtral_config(**ours, rotary_base=rotary_base_of(fields, default=1e6))


def mixtral_to_hugging_face(config: TransformerConfig) -> dict[str, Any]:
    """Write the content of a `config.json`.

    Args:
        config: a Mixtral.

    Returns:
        The fields of `MixtralConfig`.

    Raises:
        UnsupportedModelError: their Mixtral cannot be this model.

    Example:
        >>> from recollect.lab.models.sizes import NAMED_CONFIGS
        >>> mixtral_to_hugging_face(NAMED_CONFIGS["mixtral-8x7b"])["num_local_experts"]
        8
    """
    others = {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "head_dim": config.kv_channels,
        "rope_theta": config.rotary_base,
        "router_aux_loss_coef": config.moe_aux_loss_coeff,
        **_FIXED,
    }
    return checked_fields(config, _SAME, others, read=mixtral_from_hugging_face, architecture="Mixtral")


def mixtral_rules(config: TransformerConfig) -> Iterator[WeightRule]:
    """Yield a rule for each tensor of a Mixtral.

    Args:
        config: its dimensions.

    Yields:
        Rules, in the order of the layers.

    Example:
        >>> from recollect.lab.models.sizes import NAMED_CONFIGS
        >>> [rule.ours for rule in mixtral_rules(NAMED_CONFIGS["mixtral-tiny"])][1]
        'decoder.layers.0.input_layernorm.weight'
    """
    layers = (_layer(config, f"decoder.layers.{n}", f"model.layers.{n}") for n in range(config.num_layers))
    yield from decoder_rules(config, chain.from_iterable(layers))


def _layer(config: TransformerConfig, ours: str, theirs: str) -> Iterator[WeightRule]:
    yield from attention_rules(config, ours, theirs)
    old, new, width = f"{theirs}.block_sparse_moe", f"{theirs}.mlp", config.moe_ffn_hidden_size
    yield rename(f"{ours}.mlp.router.weight", f"{old}.gate.weight", f"{new}.gate.weight")
    experts = config.num_moe_experts or 0
    separate = Layout((f"{old}.experts.{{}}.w1.weight", f"{old}.experts.{{}}.w3.weight"), experts)
    stacked = Layout((f"{new}.experts.gate_up_proj",))
    yield WeightRule(f"{ours}.mlp.experts.linear_fc1.weight", (separate, stacked), (width, width))
    separate, stacked = Layout((f"{old}.experts.{{}}.w2.weight",), experts), Layout((f"{new}.experts.down_proj",))
    yield WeightRule(f"{ours}.mlp.experts.linear_fc2.weight", (separate, stacked))
