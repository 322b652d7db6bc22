"""Describe a transformer in one frozen dataclass with Megatron's field names, and check it. Imports no torch.

Names, meanings and defaults are those of `TransformerConfig`, `MLATransformerConfig` and `GPTModel` in Megatron Core, so a
Megatron configuration can be used unchanged. Two things differ: `core_attention` is new, and activations are given by name, not
as functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

_NOT_NEGATIVE = ("init_method_std", "moe_router_bias_update_rate", "moe_aux_loss_coeff", "mtp_loss_scaling_factor")
_POSITIVE = ("rotary_base", "layernorm_epsilon")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
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

    num_layers: int
    """Transformer layers of the decoder, without those of multi-token prediction."""
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
    """Longest sequence: rows of the learned position embedding; with rotary positions informative only, not a limit."""
    position_embedding_type: Literal["learned_absolute", "rope"] = "learned_absolute"
    """Add a learned embedding, or rotate queries and keys; latent attention always rotates a part of them."""
    rotary_base: float = 10_000.0
    """Base of the rotary frequencies."""
    rotary_interleaved: bool = False
    """Rotate channels 2i and 2i+1 as a pair, instead of i and i + half."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Kind of every norm in the model."""
    layernorm_epsilon: float = 1e-5
    """Added to the variance, or to the mean square."""
    add_bias_linear: bool = True
    """Biases in `linear_qkv`, `linear_proj`, `linear_fc1` and `linear_fc2`, also of experts; never in the LM head."""
    add_qkv_bias: bool = False
    """A bias in `linear_qkv` even if `add_bias_linear` is off."""
    gated_linear_unit: bool = False
    """The MLP multiplies its activation by a second projection (SwiGLU with "silu")."""
    activation_func: Literal["gelu", "gelu_tanh", "silu", "relu"] = "gelu"
    """Activation of MLPs and experts; "gelu_tanh" is GPT-2's approximation."""
    hidden_dropout: float = 0.1
    """Dropout of the embedding, and of the outputs of attention and MLP."""
    attention_dropout: float = 0.1
    """Dropout of the attention probabilities."""
    share_embeddings_and_output_weights: bool = False
    """Use the word embedding as LM head (tied); Megatron's flag `--untie-embeddings-and-output-weights` turns it off."""
    core_attention: Literal["fused", "unfused"] = "fused"
    """Attention by `scaled_dot_product_attention`, or as softmax(QK^T)V op by op, with every intermediate a separate value."""
    separate_projections: bool = False
    """A matrix each for queries, keys, values, gate and up, as torchtitan and Hugging Face have; not in experts."""
    init_method_std: float = 0.02
    """Standard deviation of new weights, divided by sqrt(2 * num_layers) for matrices that write into the residual stream."""

    num_moe_experts: int | None = None
    """Routed experts of a mixture-of-experts layer; None: every layer is dense."""
    moe_layer_freq: int | Sequence[int] = 1
    """N: every Nth layer has experts, starting with the first; or a 1 (experts) or 0 (dense) for each layer."""
    moe_ffn_hidden_size: int = 0
    """Width inside one expert; 0 or None: `ffn_hidden_size`."""
    moe_router_topk: int = 2
    """Experts per token."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """How logits become weights: a softmax over the chosen experts, or sigmoids divided by the sum of the chosen ones."""
    moe_router_num_groups: int | None = None
    """Groups of experts for group-limited routing (DeepSeek-V3); None: no groups."""
    moe_router_group_topk: int | None = None
    """Groups that a token may choose experts from."""
    moe_router_pre_softmax: bool = False
    """Softmax over all experts before the choice, instead of over the chosen ones after it."""
    moe_router_dtype: Literal["fp32"] | None = None
    """Dtype of the router's logits; None: that of the model. Scores and weights are always fp32."""
    moe_router_topk_scaling_factor: float | None = None
    """Factor on the weights of the chosen experts; None: 1."""
    moe_router_enable_expert_bias: bool = False
    """Balance load by a bias on the scores when choosing (DeepSeek-V3, auxiliary-loss-free); needs "sigmoid"."""
    moe_router_bias_update_rate: float = 1e-3
    """Step of that bias after each optimizer step."""
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "none"] = "aux_loss"
    """Auxiliary loss over the batch, over each sequence, or none."""
    moe_aux_loss_coeff: float = 0.0
    """Weight of the auxiliary loss."""
    moe_shared_expert_intermediate_size: int | None = None
    """Width inside the shared expert (DeepSeek); None: no shared expert."""
    moe_grouped_gemm: bool = False
    """Multiply all experts in one grouped kernel, instead of one by one."""

    multi_latent_attention: bool = False
    """Attention of DeepSeek-V2 and V3: keys and values from one small latent vector."""
    q_lora_rank: int | None = 512
    """Width of the latent vector of queries; None: queries are projected directly."""
    kv_lora_rank: int = 512
    """Width of the latent vector of keys and values."""
    qk_head_dim: int = 128
    """Channels of a query and key head without position."""
    qk_pos_emb_head_dim: int = 64
    """Rotated channels of a query and key head; all heads share this part of the key."""
    v_head_dim: int = 128
    """Channels of a value head."""

    mtp_num_layers: int | None = None
    """Depths of multi-token prediction (DeepSeek-V3), one layer each; None: none."""
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
        vars(self).update(derived, _derived=frozenset(derived))  # not a field: it does not describe the model
        if not isinstance(self.moe_layer_freq, int):
            vars(self)["moe_layer_freq"] = tuple(self.moe_layer_freq)
        _check_ranges(self)
        if self.hidden_size % self.num_attention_heads and "kv_channels" in derived:
            expected = f"a multiple of num_attention_heads = {self.num_attention_heads}, or kv_channels set"
            _refuse("hidden_size", self.hidden_size, expected)
        _check_attention(self)
        _check_experts(self)

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

    def is_moe_layer(self, layer: int) -> bool:
        """Tell whether a layer has experts instead of a dense MLP.

        Args:
            layer: from 0; from `num_layers` on, the layers of multi-token prediction, which are like the last one.
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


def _refuse(name: str, got: Any, expected: str) -> None:
    raise ValueError(f"TransformerConfig.{name}: got {got!r}, expected {expected}.")


def _check_ranges(config: TransformerConfig) -> None:
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if get_origin(hint) is Literal and value not in get_args(hint):
            _refuse(name, value, f"one of {', '.join(get_args(hint))}")
        if hint is int or (hint == int | None and value is not None):
            if not isinstance(value, int) or isinstance(value, bool):
                _refuse(name, value, "a whole number")
            if value < 1:
                _refuse(name, value, "at least 1" + ("" if hint is int else ", or None for none"))
    for name in _NOT_NEGATIVE:
        if not getattr(config, name) >= 0:
            _refuse(name, getattr(config, name), "at least 0")
    for name in _POSITIVE:
        if not getattr(config, name) > 0:
            _refuse(name, getattr(config, name), "more than 0")
    for name in ("hidden_dropout", "attention_dropout"):
        if not 0 <= getattr(config, name) < 1:
            _refuse(name, getattr(config, name), "a probability from 0 up to, but not including, 1")


def _check_attention(config: TransformerConfig) -> None:
    heads = config.num_attention_heads
    if heads % config.num_query_groups:
        _refuse("num_query_groups", config.num_query_groups, f"a divisor of num_attention_heads = {heads}")
    if config.multi_latent_attention:
        if config.num_query_groups != heads:
            expected = (
                f"num_attention_heads = {heads}, because with multi_latent_attention all heads share one latent vector"
            )
            _refuse("num_query_groups", config.num_query_groups, expected)
        if config.qk_pos_emb_head_dim % 2:
            _refuse("qk_pos_emb_head_dim", config.qk_pos_emb_head_dim, "an even number: rotary positions rotate pairs")
    elif config.position_embedding_type == "rope" and config.kv_channels % 2:
        expected = "an even number, because rotary positions rotate pairs of channels (it is hidden_size / num_attention_heads)"
        _refuse("kv_channels", config.kv_channels, expected)


def _check_experts(config: TransformerConfig) -> None:
    experts = config.num_moe_experts
    if experts is None:
        for name in ("moe_shared_expert_intermediate_size", "moe_router_num_groups", "moe_router_group_topk"):
            if getattr(config, name) is not None:
                _refuse(name, getattr(config, name), "None if num_moe_experts is None; set num_moe_experts too")
        return
    if config.moe_router_topk > experts:
        _refuse("moe_router_topk", config.moe_router_topk, f"at most num_moe_experts = {experts}")
    if config.moe_router_enable_expert_bias and config.moe_router_score_function != "sigmoid":
        _refuse("moe_router_enable_expert_bias", True, "False, or moe_router_score_function 'sigmoid'")
    if config.moe_router_dtype not in (None, "fp32"):
        _refuse("moe_router_dtype", config.moe_router_dtype, "'fp32', or None for the dtype of the model")
    _check_layer_pattern(config)
    _check_groups(config, experts)
    for name in ("hidden_size", "moe_ffn_hidden_size"):
        if config.moe_grouped_gemm and getattr(config, name) % 8:
            expected = "a multiple of 8, because grouped products read 16 bytes at once, or moe_grouped_gemm False"
            _refuse(name, getattr(config, name), expected)


def _check_layer_pattern(config: TransformerConfig) -> None:
    pattern = config.moe_layer_freq
    if isinstance(pattern, int):
        if pattern < 1:
            _refuse("moe_layer_freq", pattern, "at least 1, or a 1 or 0 for each layer")
        return
    if len(pattern) != config.num_layers:
        _refuse("moe_layer_freq", pattern, f"an entry for each of num_layers = {config.num_layers} layers")
    if any(entry not in (0, 1) for entry in pattern):
        _refuse("moe_layer_freq", pattern, "1 (experts) or 0 (dense) for each layer")


def _check_groups(config: TransformerConfig, experts: int) -> None:
    groups, chosen = config.moe_router_num_groups, config.moe_router_group_topk
    if groups is None and chosen is None:
        return
    if groups is None or chosen is None:
        missing = "moe_router_num_groups" if groups is None else "moe_router_group_topk"
        _refuse(missing, None, "a number: moe_router_num_groups and moe_router_group_topk only work together")
        return
    if experts % groups:
        _refuse("moe_router_num_groups", groups, f"a divisor of num_moe_experts = {experts}")
    if chosen > groups:
        _refuse("moe_router_group_topk", chosen, f"at most moe_router_num_groups = {groups}")
    reachable = chosen * (experts // groups)
    if config.moe_router_topk > reachable:
        expected = f"at most {reachable}, the experts in {chosen} of {groups} groups"
        _refuse("moe_router_topk", config.moe_router_topk, expected)
