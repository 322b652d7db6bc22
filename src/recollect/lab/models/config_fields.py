"""The fields of a transformer configuration, with Megatron's names, meanings and defaults. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["TransformerFields"]


@dataclass(frozen=True, kw_only=True)
class TransformerFields:
    """What `TransformerConfig` is made of, before defaults are derived and checked."""

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
