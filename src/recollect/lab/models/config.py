"""Describe a transformer in one frozen dataclass with Megatron's field names. Imports no torch.

Names, meanings and defaults are those of `TransformerConfig`, `MLATransformerConfig` and `GPTModel` in Megatron Core, so a
Megatron configuration can be used unchanged. Two things differ: `core_attention` is new, and activations are given by name, not
as functions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from recollect.lab.models.config_fields import TransformerFields, check

__all__ = ["TransformerConfig"]


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
        """Exact number of trainable parameters, including multi-token prediction.

        A tied matrix counts once; the biases of auxiliary-loss-free routing are buffers and do not count.
        """
        experts = self.num_moe_experts or 0
        mtp_layer = self._layer(self.num_layers, experts) + 3 * self._norm(self.hidden_size)
        mtp_layer += 2 * self.hidden_size**2  # eh_proj maps both norms' outputs to one
        return self._decoder(experts) + (self.mtp_num_layers or 0) * mtp_layer

    @property
    def num_active_parameters(self) -> int:
        """Parameters used to predict one token.

        Of the routed experts, `moe_router_topk` count; multi-token prediction does not. Embeddings count in full, as in
        published figures.
        """
        return self._decoder(self.moe_router_topk)

    def layer_weights(self, layer: int, experts: int) -> int:
        """Count the weights in the matrices of a layer.

        Args:
            layer: from 0; see `is_moe_layer`.
            experts: how many of its routed experts count.
        """
        d, heads = self.hidden_size, self.num_attention_heads
        if self.multi_latent_attention:
            queries = heads * (self.qk_head_dim + self.qk_pos_emb_head_dim)
            weights = d * queries if self.q_lora_rank is None else self.q_lora_rank * (d + queries)
            weights += d * (self.kv_lora_rank + self.qk_pos_emb_head_dim)
            weights += self.kv_lora_rank * heads * (self.qk_head_dim + self.v_head_dim) + heads * self.v_head_dim * d
        else:
            weights = d * self.kv_channels * 2 * (heads + self.num_query_groups)
        widths = self._widths(layer, experts)
        router = d * (self.num_moe_experts or 0) if self.is_moe_layer(layer) else 0
        return weights + router + (3 if self.gated_linear_unit else 2) * d * sum(widths)

    def _widths(self, layer: int, experts: int) -> list[int]:
        """Return the widths inside the MLPs of a layer."""
        if not self.is_moe_layer(layer):
            return [self.ffn_hidden_size]
        shared = self.moe_shared_expert_intermediate_size
        return [self.moe_ffn_hidden_size] * experts + ([] if shared is None else [shared])

    def _decoder(self, experts: int) -> int:
        d = self.hidden_size
        matrices = 1 if self.share_embeddings_and_output_weights else 2
        positions = self.max_position_embeddings if self.position_embedding_type == "learned_absolute" else 0
        layers = sum(self._layer(layer, experts) for layer in range(self.num_layers))
        return (matrices * self.vocab_size + positions) * d + layers + self._norm(d)

    def _layer(self, layer: int, experts: int) -> int:
        """Count the parameters of a layer: its matrices, norms and biases."""
        count = self.layer_weights(layer, experts) + 2 * self._norm(self.hidden_size)
        if self.multi_latent_attention:
            count += sum(self._norm(rank) for rank in (self.q_lora_rank, self.kv_lora_rank) if rank is not None)
        elif self.add_bias_linear or self.add_qkv_bias:
            count += (self.num_attention_heads + 2 * self.num_query_groups) * self.kv_channels
        if self.add_bias_linear:
            # Of latent attention, as in Megatron, only the projection out of it has one.
            count += self.hidden_size
            gates = 2 if self.gated_linear_unit else 1
            count += sum(gates * width + self.hidden_size for width in self._widths(layer, experts))
        return count

    def _norm(self, channels: int) -> int:
        return 2 * channels if self.normalization == "LayerNorm" else channels
