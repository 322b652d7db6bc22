"""Describe a transformer in one frozen dataclass with Megatron's field names, and check it. Imports no torch.

Names, meanings and defaults follow `TransformerConfig`, `MLATransformerConfig` and `GPTModel` in Megatron Core, so a
Megatron configuration can be used unchanged. Two things differ: `core_attention` is new, and activations are given by name, not
as functions. The help of flags with these names is the text below, up to the first semicolon.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from recollect.lab.models import config_checks


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Dimensions and parts of a decoder-only transformer: GPT, Llama, Mixtral, DeepSeek-V3 and mixtures of them.

    The defaults are GPT's: LayerNorm, GELU, learned positions, biases and dropout. `recollect.lab.models.sizes` has the
    published models by name.
    """

    num_layers: int
    """Transformer layers; those of multi-token prediction do not count."""
    hidden_size: int
    """Width of the residual stream."""
    num_attention_heads: int
    """Query heads."""
    vocab_size: int
    """Rows of the word embedding."""
    num_query_groups: int = 0
    """Key and value heads; 0 or None: as many as `num_attention_heads`; fewer: grouped-query attention."""
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
    """Rotate neighbouring channels as pairs; off: channels i and i + half."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Kind of every norm in the model."""
    layernorm_epsilon: float = 1e-5
    """Added to the variance, or to the mean square."""
    add_bias_linear: bool = True
    """Biases in `linear_qkv`, `linear_proj`, `linear_fc1` and `linear_fc2`, also of experts; never in the LM head."""
    add_qkv_bias: bool = False
    """A bias in `linear_qkv` even if `add_bias_linear` is off."""
    qk_layernorm: bool = False
    """Norms of each query and key head, before rotary positions (Qwen3); latent attention always has those of its vectors."""
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
    """Separate matrices for queries, keys, values, gate and up, as in torchtitan and Hugging Face; not in experts."""
    init_method_std: float = 0.02
    """Standard deviation of new weights; divided by sqrt(2 * num_layers) for matrices that write into the residual stream."""

    num_moe_experts: int | None = None
    """Routed experts in a layer; None: every layer is dense."""
    moe_layer_freq: int | Sequence[int] = 1
    """N: every Nth layer has experts, starting with the first; or a 1 (experts) or 0 (dense) for each layer."""
    moe_ffn_hidden_size: int = 0
    """Width inside one expert; 0 or None: `ffn_hidden_size`."""
    moe_router_topk: int = 2
    """Experts per token."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """How the router's logits become weights; a softmax over the chosen experts, or sigmoids divided by the sum of theirs."""
    moe_router_num_groups: int | None = None
    """Groups of experts for group-limited routing; None: no groups."""
    moe_router_group_topk: int | None = None
    """Groups that a token may choose from."""
    moe_router_pre_softmax: bool = False
    """Softmax over all experts before the choice, instead of over the chosen ones after it."""
    moe_router_dtype: Literal["fp32"] | None = None
    """Dtype of the router's logits; None: that of the model. Scores and weights are always fp32."""
    moe_router_topk_scaling_factor: float | None = None
    """Factor on the weights of the chosen experts; None: 1."""
    moe_router_enable_expert_bias: bool = False
    """Balance load by a bias on the scores when choosing; auxiliary-loss-free (DeepSeek-V3), needs "sigmoid"."""
    moe_router_bias_update_rate: float = 1e-3
    """Step of that bias; it is taken after each optimizer step."""
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "none"] = "aux_loss"
    """Auxiliary loss over the batch, over each sequence, or none."""
    moe_aux_loss_coeff: float = 0.0
    """Weight of the auxiliary loss."""
    moe_shared_expert_intermediate_size: int | None = None
    """Width inside the shared expert; None: no shared expert."""
    moe_grouped_gemm: bool = False
    """Multiply all experts in one grouped kernel; off: one by one."""

    multi_latent_attention: bool = False
    """Keys and values from one small latent vector (DeepSeek-V2 and V3)."""
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
    """Depths of multi-token prediction; one layer each (DeepSeek-V3), None: none."""
    mtp_loss_scaling_factor: float = 0.1
    """Weight of the mean of their losses."""

    fp8: Literal["e4m3", "hybrid"] | None = None
    """Multiply in 8 bits in attention's projections, MLPs and experts: all of it e4m3, or gradients e5m2; None: do not."""
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = "delayed"
    """How values are scaled before they are cast; `recollect.lab.models.fp8` defines each recipe."""
    fp8_margin: int = 0
    """delayed: scale to the largest number of the format divided by 2 to this power."""
    fp8_amax_history_len: int = 1
    """delayed: how many micro-batches the history has; of forwards, or of backwards."""
    fp8_amax_compute_algo: Literal["most_recent", "max"] = "most_recent"
    """delayed: scale by the last entry of the history, or by its largest."""
    fp8_emulated: bool | None = None
    """Multiply the cast values in fp32; None: on a CPU; True: on every device; False: on none, not even for fake tensors."""
    first_last_layers_bf16: bool = False
    """Leave the first and last layers in 16 bits; how many, say the two fields below."""
    num_layers_at_start_in_bf16: int = 1
    """How many of the first, with `first_last_layers_bf16`."""
    num_layers_at_end_in_bf16: int = 1
    """How many of the last, with `first_last_layers_bf16`; layers of multi-token prediction are like the last one."""

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
        config_checks.check_ranges(self)
        if self.hidden_size % self.num_attention_heads and "kv_channels" in derived:
            expected = f"a multiple of num_attention_heads = {self.num_attention_heads}, or kv_channels set"
            config_checks.refuse(self, "hidden_size", expected)
        config_checks.check_attention(self)
        config_checks.check_experts(self)
        config_checks.check_fp8(self)

    def changed(self, **changes: Any) -> TransformerConfig:
        """Return a configuration with changed fields; unlike `dataclasses.replace`, derive again what was derived.

        With a new `num_layers`, a list in `moe_layer_freq` is cut, or extended by its last entry.
        """
        given = self.given()
        pattern = given.get("moe_layer_freq")
        if "num_layers" in changes and isinstance(pattern, tuple):
            num_layers = changes["num_layers"]
            given["moe_layer_freq"] = (*pattern[:num_layers], *pattern[-1:] * (num_layers - len(pattern)))
        return TransformerConfig(**{**given, **changes})

    def given(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in vars(self)["_derived"]}

    def is_moe_layer(self, layer: int) -> bool:
        """Tell whether a layer has experts instead of a dense MLP.

        Layers are numbered from 0; those of multi-token prediction come after the last one, and are like it.
        """
        if self.num_moe_experts is None:
            return False
        layer = min(layer, self.num_layers - 1)
        if isinstance(self.moe_layer_freq, int):
            return layer % self.moe_layer_freq == 0
        return bool(self.moe_layer_freq[layer])

    def of_layer(self, layer: int) -> TransformerConfig:
        """Return the configuration of a layer: this one, or for a layer that `first_last_layers_bf16` leaves, without `fp8`."""
        last = self.num_layers - self.num_layers_at_end_in_bf16
        is_left = min(layer, self.num_layers - 1) >= last or layer < self.num_layers_at_start_in_bf16
        if self.fp8 is None or not (self.first_last_layers_bf16 and is_left):
            return self
        return self.changed(**{f.name: f.default for f in fields(self) if f.name in config_checks.FP8_FIELDS})

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

        `moe_router_topk` of the routed experts count; multi-token prediction does not. Embeddings count in full, as in
        published figures.
        """
        return self._decoder(self.moe_router_topk)

    def layer_weights(self, layer: int, experts: int) -> int:
        """Count the weights in the matrices of a layer, with some number of its routed experts."""
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
        count = self.layer_weights(layer, experts) + 2 * self._norm(self.hidden_size)
        if self.multi_latent_attention:
            count += sum(self._norm(rank) for rank in (self.q_lora_rank, self.kv_lora_rank) if rank is not None)
        elif self.add_bias_linear or self.add_qkv_bias:
            count += (self.num_attention_heads + 2 * self.num_query_groups) * self.kv_channels
        if self.qk_layernorm and not self.multi_latent_attention:
            count += 2 * self._norm(self.kv_channels)
        if self.add_bias_linear:
            # Of latent attention, as in Megatron, only the projection out of it has one.
            count += self.hidden_size
            gates = 2 if self.gated_linear_unit else 1
            count += sum(gates * width + self.hidden_size for width in self._widths(layer, experts))
        return count

    def _norm(self, channels: int) -> int:
        return 2 * channels if self.normalization == "LayerNorm" else channels


def model_flops(
    config: TransformerConfig, *, num_sequences: int, seq_length: int, attention_fraction: float = 0.5
) -> float:
    """Return the FLOPs of one training step by formula: the arithmetic that it requires, however it is run.

    A product of [m, k] and [k, n] takes 2mkn FLOPs, and training runs three for each product of forward: one in forward, and
    one for the gradient of each factor. Not counted are recompute (neither in plans nor inside attention kernels; hardware
    FLOPs count it, see `recollect.lab.bench.measure`), norms, activations and the optimizer.

    `num_sequences` are those of all micro-batches. Of the [seq, seq] scores the `attention_fraction` counts: half by a causal
    mask, with the diagonal counted as half; 1 for unfused attention, which computes all of them.

    References:
        D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021,
        appendix. https://arxiv.org/abs/2104.04473. Deviations: masked attention scores are not counted, as in Megatron since
        2024 and, where stated, in PaLM's appendix B; grouped queries, gates, experts and latent attention count as they are.
        V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, appendix A, for the two
        kinds of FLOPs. https://arxiv.org/abs/2205.05198
    """
    if config.multi_latent_attention:
        channels = config.qk_head_dim + config.qk_pos_emb_head_dim + config.v_head_dim
    else:
        channels = 2 * config.kv_channels
    # Multiply-adds of core attention for one query, over all heads.
    attention = attention_fraction * seq_length * config.num_attention_heads * channels
    depths = config.mtp_num_layers or 0
    layers = range(config.num_layers + depths)
    per_token = sum(config.layer_weights(layer, config.moe_router_topk) + attention for layer in layers)
    per_token += config.vocab_size * config.hidden_size * (1 + depths)
    per_token += depths * 2 * config.hidden_size * config.hidden_size  # each depth joins two streams into one
    return 3.0 * 2 * num_sequences * seq_length * per_token
