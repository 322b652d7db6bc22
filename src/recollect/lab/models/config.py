"""What a transformer is: one frozen dataclass with Megatron's names, for every model here. Imports no torch.

A name, its meaning and its default are those of `TransformerConfig`, `MLATransformerConfig` and `GPTModel` in
Megatron Core wherever they have it, so that a configuration can be brought as it is. What is not Megatron's:
`core_attention`, and activations by name instead of by function.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from recollect.lab.models.config_checks import check
from recollect.lab.models.parameter_counts import active_parameters, all_parameters

__all__ = ["TransformerConfig"]


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Dimensions and parts of a decoder-only transformer: GPT, Llama, Mixtral, DeepSeek-V3 and what lies between them.

    The defaults are GPT's: LayerNorm, GELU, learned positions, biases and dropout. `recollect.lab.models.sizes` has the
    published models by name.

    Raises:
        ValueError: a field out of its range, or fields that do not fit together; the message names them.

    Example:
        >>> config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=256)
        >>> config.ffn_hidden_size, config.kv_channels, config.num_query_groups
        (256, 16, 4)
        >>> config.num_parameters
        263936
    """

    num_layers: int
    """Transformer layers of the decoder; those of multi-token prediction come on top."""
    hidden_size: int
    """Width of the residual stream."""
    num_attention_heads: int
    """Query heads."""
    vocab_size: int
    """Rows of the word embedding."""
    num_query_groups: int = 0
    """Key and value heads (grouped-query attention); 0 or None: as many as `num_attention_heads`."""
    kv_channels: int = 0
    """Channels of one head; 0 or None: `hidden_size / num_attention_heads`. Latent attention has its own three fields."""
    ffn_hidden_size: int = 0
    """Width inside the MLP; 0 or None: `4 * hidden_size`."""
    max_position_embeddings: int = 2048
    """Longest sequence: rows of the learned position embedding; with rotary positions a fact about the model, no limit."""
    position_embedding_type: Literal["learned_absolute", "rope"] = "learned_absolute"
    """By an embedding that is added, or by turning queries and keys; latent attention turns a part of them in any case."""
    rotary_base: float = 10_000.0
    """Base of the rotary frequencies."""
    rotary_interleaved: bool = False
    """Turn channels 2i and 2i+1 as a pair, instead of i and i + half."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Every norm of the model."""
    layernorm_epsilon: float = 1e-5
    """Added to the variance, or to the mean square."""
    add_bias_linear: bool = True
    """Biases in `linear_qkv`, `linear_proj`, `linear_fc1` and `linear_fc2`, of experts too; never in the output layer."""
    add_qkv_bias: bool = False
    """A bias in `linear_qkv` even where `add_bias_linear` is off."""
    gated_linear_unit: bool = False
    """The MLP multiplies its activation by a second projection (SwiGLU with "silu")."""
    activation_func: Literal["gelu", "gelu_tanh", "silu", "relu"] = "gelu"
    """Activation of MLP and experts; "gelu_tanh" is GPT-2's approximation."""
    hidden_dropout: float = 0.1
    """Dropout of the embedding and of what each half of a layer adds to the residual stream."""
    attention_dropout: float = 0.1
    """Dropout of the attention probabilities."""
    share_embeddings_and_output_weights: bool = False
    """Use the word embedding as output matrix (tied); Megatron's flag `--untie-embeddings-and-output-weights` turns it off."""
    core_attention: Literal["fused", "unfused"] = "fused"
    """Attention by `scaled_dot_product_attention`, or as softmax(QK^T)V with every intermediate a value of its own."""
    init_method_std: float = 0.02
    """Standard deviation of new weights; matrices that write into the residual stream get it / sqrt(2 * num_layers)."""

    num_moe_experts: int | None = None
    """Routed experts of a mixture-of-experts layer; None: every layer is dense."""
    moe_layer_freq: int | Sequence[int] = 1
    """N: every Nth layer, from the first, has experts; or a 1 (experts) or 0 (dense) for each layer."""
    moe_ffn_hidden_size: int = 0
    """Width inside one expert; 0 or None: `ffn_hidden_size`."""
    moe_router_topk: int = 2
    """Experts that a token goes to."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """How logits become weights: a softmax over the chosen experts only, or sigmoids divided by the sum of the chosen ones."""
    moe_router_num_groups: int | None = None
    """Groups that experts are divided into for group-limited routing (DeepSeek-V3); None: no groups."""
    moe_router_group_topk: int | None = None
    """Groups that a token may choose experts from."""
    moe_router_pre_softmax: bool = False
    """Softmax over all experts before the choice, instead of over the chosen ones after it."""
    moe_router_dtype: Literal["fp32"] | None = None
    """Compute the router's logits in fp32, whatever the dtype of the model; None: in that. Scores and weights are fp32."""
    moe_router_topk_scaling_factor: float | None = None
    """Factor on the weights of the chosen experts; None: 1."""
    moe_router_enable_expert_bias: bool = False
    """Balance load with a bias on the scores that choose (DeepSeek-V3, auxiliary-loss-free); needs "sigmoid"."""
    moe_router_bias_update_rate: float = 1e-3
    """Step of that bias after each optimizer step."""
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "none"] = "aux_loss"
    """Auxiliary loss over the batch, over each sequence, or none."""
    moe_aux_loss_coeff: float = 0.0
    """Weight of the auxiliary loss."""
    moe_shared_expert_intermediate_size: int | None = None
    """Width inside the expert that every token passes (DeepSeek); None: no such expert."""
    moe_grouped_gemm: bool = False
    """All experts' products in one grouped kernel, instead of one by one."""

    multi_latent_attention: bool = False
    """Attention of DeepSeek-V2 and V3: keys and values from one small latent vector."""
    q_lora_rank: int | None = 512
    """Width of the latent vector of queries; None: queries are projected at once."""
    kv_lora_rank: int = 512
    """Width of the latent vector of keys and values."""
    qk_head_dim: int = 128
    """Channels of a query and key head without position."""
    qk_pos_emb_head_dim: int = 64
    """Channels of a query and key head that are turned; one such key is shared by all heads."""
    v_head_dim: int = 128
    """Channels of a value head."""

    mtp_num_layers: int | None = None
    """Depths of multi-token prediction (DeepSeek-V3), each with a layer of its own; None: none."""
    mtp_loss_scaling_factor: float = 0.1
    """Weight of the mean of their losses."""

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
        object.__setattr__(self, "_derived", frozenset(derived))  # no field: it says nothing about the model
        if not isinstance(self.moe_layer_freq, int):
            object.__setattr__(self, "moe_layer_freq", tuple(self.moe_layer_freq))
        check(self, has_own_kv_channels="kv_channels" not in derived)

    def changed(self, **changes: Any) -> TransformerConfig:
        """Change fields; those that were derived from others are derived again, which `dataclasses.replace` would not do.

        With another `num_layers` alone, a list of `moe_layer_freq` is cut, or goes on with its last entry.

        Args:
            **changes: fields and their new values.

        Returns:
            The changed configuration.

        Raises:
            ValueError: fields that do not fit together.
            TypeError: a field that there is not.

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
        """Return the fields that were not derived from others, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in vars(self)["_derived"]}

    def is_moe_layer(self, layer: int) -> bool:
        """Tell whether a layer has experts instead of a dense MLP.

        Args:
            layer: from 0; `num_layers` and more are the layers of multi-token prediction, which are like the last one.
        """
        if self.num_moe_experts is None:
            return False
        layer = min(layer, self.num_layers - 1)
        if isinstance(self.moe_layer_freq, int):
            return layer % self.moe_layer_freq == 0
        return bool(self.moe_layer_freq[layer])

    @property
    def scaled_init_method_std(self) -> float:
        """Standard deviation of new matrices that write into the residual stream: `linear_proj` and `linear_fc2`."""
        return self.init_method_std / math.sqrt(2 * self.num_layers)

    @property
    def num_parameters(self) -> int:
        """Exact number of trainable parameters; a tied matrix counts once, multi-token prediction is included."""
        return all_parameters(self)

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token meets when the next one is predicted: of routed experts `moe_router_topk`."""
        return active_parameters(self)
