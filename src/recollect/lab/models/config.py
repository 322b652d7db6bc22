"""Describe a transformer in one frozen dataclass with Megatron's field names. Imports no torch.

Names, meanings and defaults are those of `TransformerConfig`, `MLATransformerConfig` and `GPTModel` in Megatron Core, so a
Megatron configuration can be used unchanged. Two things differ: `core_attention` is new, and activations are given by name, not
as functions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from recollect.lab.models.config_checks import check
from recollect.lab.models.config_fields import TransformerFields

__all__ = ["TransformerConfig", "active_parameters", "all_parameters"]


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(TransformerFields):
    """Dimensions and parts of a decoder-only transformer: GPT, Llama, Mixtral, DeepSeek-V3 and mixtures of them.

    The defaults are GPT's: LayerNorm, GELU, learned positions, biases and dropout. `recollect.lab.models.sizes` has the
    published models by name.

    Raises:
        ValueError: a field is out of range, or fields clash; the message names them.

    Example:
        >>> config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=256)
        >>> config.ffn_hidden_size, config.kv_channels, config.num_query_groups
        (256, 16, 4)
        >>> config.num_parameters
        263936
    """

    def __post_init__(self) -> None:
        derived = {
            "num_query_groups": self.num_attention_heads,
            "ffn_hidden_size": 4 * self.hidden_size,
            "kv_channels": self.hidden_size // max(self.num_attention_heads, 1),
            "moe_ffn_hidden_size": self.ffn_hidden_size or 4 * self.hidden_size,
        }
        derived = {name: value for name, value in derived.items() if not getattr(self, name)}
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_derived", frozenset(derived))  # not a field: it does not describe the model
        if not isinstance(self.moe_layer_freq, int):
            object.__setattr__(self, "moe_layer_freq", tuple(self.moe_layer_freq))
        check(self, has_own_kv_channels="kv_channels" not in derived)

    def changed(self, **changes: Any) -> TransformerConfig:
        """Return a configuration with changed fields; unlike `dataclasses.replace`, derive again what was derived.

        With a new `num_layers`, a list in `moe_layer_freq` is cut, or extended by its last entry.

        Args:
            **changes: fields and their new values.

        Raises:
            ValueError: fields clash.
            TypeError: an unknown field.

        Example:
            >>> config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=256)
            >>> config.changed(hidden_size=128).ffn_hidden_size
            512
        """
        given = self.given()
        pattern = given.get("moe_layer_freq")
        if "num_layers" in changes and isinstance(pattern, tuple):
            num_layers = changes["num_layers"]
            given["moe_layer_freq"] = (*pattern[:num_layers], *pattern[-1:] * (num_layers - len(pattern)))
        return TransformerConfig(**{**given, **changes})

    def given(self) -> dict[str, Any]:
        """Return the fields that were given, not derived from others, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in vars(self)["_derived"]}

    @property
    def scaled_init_method_std(self) -> float:
        """Standard deviation of new matrices that write into the residual stream: `linear_proj` and `linear_fc2`."""
        return self.init_method_std / math.sqrt(2 * self.num_layers)

    @property
    def num_parameters(self) -> int:
        """Exact number of trainable parameters, including multi-token prediction; a tied matrix counts once."""
        return all_parameters(self)

    @property
    def num_active_parameters(self) -> int:
        """Parameters used to predict one token: of the routed experts, `moe_router_topk`."""
        return active_parameters(self)


def all_parameters(config: TransformerFields) -> int:
    """Count the trainable parameters of a model.

    A tied matrix counts once; the biases of auxiliary-loss-free routing are buffers and do not count.
    """
    experts = config.num_moe_experts or 0
    mtp_layer = _layer(config, config.num_layers, experts) + 3 * _norm(config, config.hidden_size)
    mtp_layer += 2 * config.hidden_size**2  # eh_proj maps both norms' outputs to one
    return _decoder(config, experts) + (config.mtp_num_layers or 0) * mtp_layer


def active_parameters(config: TransformerFields) -> int:
    """Count the parameters used to predict one token.

    Of the routed experts, `moe_router_topk` count; multi-token prediction does not. Embeddings count in full, as in published
    figures.
    """
    return _decoder(config, config.moe_router_topk)


def _decoder(config: TransformerFields, experts: int) -> int:
    d = config.hidden_size
    matrices = 1 if config.share_embeddings_and_output_weights else 2
    positions = config.max_position_embeddings if config.position_embedding_type == "learned_absolute" else 0
    layers = sum(_layer(config, index, experts) for index in range(config.num_layers))
    return (matrices * config.vocab_size + positions) * d + layers + _norm(config, d)


def _layer(config: TransformerFields, index: int, experts: int) -> int:
    attention = _latent_attention(config) if config.multi_latent_attention else _attention(config)
    mlp = _experts(config, experts) if config.is_moe_layer(index) else _mlp(config, config.ffn_hidden_size)
    return attention + mlp + 2 * _norm(config, config.hidden_size)


def _norm(config: TransformerFields, channels: int) -> int:
    return 2 * channels if config.normalization == "LayerNorm" else channels


def _attention(config: TransformerFields) -> int:
    d, c = config.hidden_size, config.kv_channels
    qkv = (config.num_attention_heads + 2 * config.num_query_groups) * c
    qkv_bias = qkv if config.add_bias_linear or config.add_qkv_bias else 0
    return d * qkv + qkv_bias + config.num_attention_heads * c * d + (d if config.add_bias_linear else 0)


def _latent_attention(config: TransformerFields) -> int:
    d, heads = config.hidden_size, config.num_attention_heads
    q = heads * (config.qk_head_dim + config.qk_pos_emb_head_dim)
    if config.q_lora_rank is None:
        count = d * q
    else:
        count = (d + q) * config.q_lora_rank + _norm(config, config.q_lora_rank)
    count += d * (config.kv_lora_rank + config.qk_pos_emb_head_dim) + _norm(config, config.kv_lora_rank)
    count += config.kv_lora_rank * heads * (config.qk_head_dim + config.v_head_dim)
    # As in Megatron, only the projection out of the attention may have a bias.
    return count + heads * config.v_head_dim * d + (d if config.add_bias_linear else 0)


def _mlp(config: TransformerFields, width: int) -> int:
    into = (2 if config.gated_linear_unit else 1) * width
    biases = into + config.hidden_size if config.add_bias_linear else 0
    return config.hidden_size * (into + width) + biases


def _experts(config: TransformerFields, experts: int) -> int:
    router = config.hidden_size * (config.num_moe_experts or 0)
    shared = config.moe_shared_expert_intermediate_size
    count = router + experts * _mlp(config, config.moe_ffn_hidden_size)
    return count if shared is None else count + _mlp(config, shared)
