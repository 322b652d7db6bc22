"""Causal self-attention with grouped queries.

Shape legend: B batch   T positions   D hidden_size   H query heads   K key and value heads   C channels of one head
"""

from __future__ import annotations

from torch import Tensor, nn

from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.core_attention import build_core_attention
from recollect.lab.models.linear import Linear
from recollect.lab.models.rotary import Rotary, rotate

__all__ = ["SelfAttention"]


class SelfAttention(nn.Module):
    """Attention with one matrix product for queries, keys and values, in that order.

    Args:
        config: the model.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.kv_channels = config.kv_channels
        self.is_rotary = config.position_embedding_type == "rope"
        query_size = config.num_attention_heads * config.kv_channels
        group_size = config.num_query_groups * config.kv_channels
        self.sizes: tuple[int, ...] = (query_size, group_size, group_size)
        qkv_bias = config.add_bias_linear or config.add_qkv_bias
        self.linear_qkv = Linear(config.hidden_size, sum(self.sizes), bias=qkv_bias, init_std=config.init_method_std)
        self.core_attention: nn.Module = build_core_attention(config)
        self.linear_proj = Linear(
            query_size, config.hidden_size, bias=config.add_bias_linear, init_std=config.scaled_init_method_std
        )

    def forward(self, x_BTD: Tensor, rotary: Rotary | None) -> Tensor:
        """Mix positions; position t sees 0..t."""
        parts = self.linear_qkv(x_BTD).split(self.sizes, dim=-1)
        q_BTHC, k_BTKC, v_BTKC = (part.unflatten(-1, (-1, self.kv_channels)) for part in parts)
        if rotary is not None and self.is_rotary:
            q_BTHC, k_BTKC = rotate(q_BTHC, rotary), rotate(k_BTKC, rotary)
            # Copy: as a view, the value would keep the unrotated queries and keys alive, which backward does not need.
            v_BTKC = v_BTKC.contiguous()
        out_BTD: Tensor = self.linear_proj(self.core_attention(q_BTHC, k_BTKC, v_BTKC))
        return out_BTD
