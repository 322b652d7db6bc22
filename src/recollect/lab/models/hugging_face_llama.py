"""Llama in Hugging Face's words: its configuration, and where its weights stand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from recollect.lab.models.architectures import llama_config
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.hugging_face_fields import (
    DECODER_FIELDS,
    checked_fields,
    meaning,
    rotary_base_of,
    same_fields,
    wanted,
)
from recollect.lab.models.hugging_face_parts import attention_rules, decoder_rules, gated_mlp_rules
from recollect.lab.models.weight_rules import WeightRule

__all__ = ["LLAMA_IGNORED", "llama_from_hugging_face", "llama_rules", "llama_to_hugging_face"]

# Rotary frequencies, which old versions of transformers stored with the weights.
LLAMA_IGNORED = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"

# Ours, and theirs where it means the same.
_SAME = {
    **DECODER_FIELDS,
    "activation_func": "hidden_act",
    "add_bias_linear": "mlp_bias",
}
# LlamaConfig's, where a file leaves a field out.
_DEFAULTS = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_attention_heads": 32,
    "vocab_size": 32_000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "mlp_bias": False,
}
_ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh", "gelu": "gelu", "relu": "relu", "silu": "silu"}


def llama_from_hugging_face(fields: Mapping[str, Any]) -> TransformerConfig:
    """Read a `config.json`.

    Args:
        fields: its content.

    Returns:
        Our configuration.

    Raises:
        UnsupportedModelError: a field asks for something that no model of ours does.

    Example:
        >>> llama_from_hugging_face({"num_hidden_layers": 2, "num_key_value_heads": 8}).num_query_groups
        8
    """
    ours = same_fields(fields, _SAME, _DEFAULTS)
    # Biases are everywhere or nowhere.
    wanted(fields, {"attention_bias": ours["add_bias_linear"], "sliding_window": None})
    by_theirs = {theirs: ours for ours, theirs in _ACTIVATIONS.items()}
    ours["activation_func"] = meaning("hidden_act", ours["activation_func"], by_theirs)
    return llama_config(
        **ours,
        num_query_groups=fields.get("num_key_value_heads") or 0,
        kv_channels=fields.get("head_dim") or 0,
        rotary_base=rotary_base_of(fields, default=1e4),
    )


def llama_to_hugging_face(config: TransformerConfig) -> dict[str, Any]:
    """Write the content of a `config.json`.

    Args:
        config: a Llama.

    Returns:
        The fields of `LlamaConfig`.

    Raises:
        UnsupportedModelError: their Llama cannot be this model.

    Example:
        >>> from recollect.lab.models.sizes import NAMED_CONFIGS
        >>> llama_to_hugging_face(NAMED_CONFIGS["8b"])["rope_theta"]
        500000.0
    """
    others = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_key_value_heads": config.num_query_groups,
        "head_dim": config.kv_channels,
        "rope_theta": config.rotary_base,
        "hidden_act": _ACTIVATIONS[config.activation_func],
        "attention_bias": config.add_bias_linear,
    }
    return checked_fields(config, _SAME, others, read=llama_from_hugging_face, architecture="Llama")


def llama_rules(config: TransformerConfig) -> Iterator[WeightRule]:
    """Yield a rule for each tensor of a Llama.

    Args:
        config: its dimensions.

    Yields:
        Rules, in the order of the layers.

    Example:
        >>> from recollect.lab.models.sizes import NAMED_CONFIGS
        >>> [rule.ours for rule in llama_rules(NAMED_CONFIGS["7b"])][1]
        'decoder.layers.0.input_layernorm.weight'
    """
    yield from decoder_rules(config, chain.from_iterable(_layer(config, n) for n in range(config.num_layers)))


def _layer(config: TransformerConfig, number: int) -> Iterator[WeightRule]:
    ours, theirs = f"decoder.layers.{number}", f"model.layers.{number}"
    yield from attention_rules(config, ours, theirs)
    yield from gated_mlp_rules(config, f"{ours}.mlp", f"{theirs}.mlp", config.ffn_hidden_size)
