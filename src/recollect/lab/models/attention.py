"""Causal self-attention: with grouped queries, or latent, which projects one small vector per position up to all heads.

Shape legend: B batch   T positions   D hidden_size   H query heads   K key and value heads   C channels of one head
    Of latent attention: Q q_lora_rank (D without one)   L kv_lora_rank   E channels of a value head
    C channels of a query and key head: qk_head_dim without position, then R = qk_pos_emb_head_dim rotated ones
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.core_attention import build_core_attention
from recollect.lab.models.linear import Linear
from recollect.lab.models.norm import build_norm
from recollect.lab.models.rotary import Rotary, rotate

__all__ = ["LatentAttention", "SelfAttention", "UpProjection"]


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


class UpProjection(nn.Module):
    """Project latent vectors to the queries, keys and values of all heads; Megatron recomputes it as `mla_up_proj`.

    Args:
        config: the model.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        heads, std = config.num_attention_heads, config.init_method_std
        self.heads = heads
        self.query_sizes = (config.qk_head_dim, config.qk_pos_emb_head_dim)
        self.key_value_sizes = (config.qk_head_dim, config.v_head_dim)
        latent = config.hidden_size if config.q_lora_rank is None else config.q_lora_rank
        self.linear_q_up_proj = Linear(latent, heads * sum(self.query_sizes), bias=False, init_std=std)
        key_value_size = heads * sum(self.key_value_sizes)
        self.linear_kv_up_proj = Linear(config.kv_lora_rank, key_value_size, bias=False, init_std=std)

    def forward(self, q_BTQ: Tensor, kv_BTL: Tensor, k_BTR: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, T, H, C], keys [B, T, H, C] and values [B, T, H, E].

        Args:
            q_BTQ: latent vectors of the queries.
            kv_BTL: latent vectors of keys and values.
            k_BTR: the rotated part of the keys, shared by all heads.
            rotary: the rotation of each position.
        """
        q_BTHC = self.linear_q_up_proj(q_BTQ).unflatten(-1, (self.heads, -1))
        unrotated_BTHC, rotated_BTHR = q_BTHC.split(self.query_sizes, dim=-1)
        q_BTHC = _heads_first(unrotated_BTHC, rotate(rotated_BTHR, rotary))
        unrotated_BTHC, v_BTHE = (
            self.linear_kv_up_proj(kv_BTL).unflatten(-1, (self.heads, -1)).split(self.key_value_sizes, dim=-1)
        )
        rotated_BTHR = rotate(k_BTR.unsqueeze(2), rotary).expand(-1, -1, self.heads, -1)
        # Copy the values: as views they would keep the whole product in memory.
        v_BTHE = v_BTHE.transpose(1, 2).contiguous().transpose(1, 2)
        return q_BTHC, _heads_first(unrotated_BTHC, rotated_BTHR), v_BTHE


def _heads_first(*parts_BTHC: Tensor) -> Tensor:
    """Concatenate parts of heads, contiguous per head as attention expects, so that it saves these and no copies."""
    return torch.cat([part.transpose(1, 2) for part in parts_BTHC], dim=-1).transpose(1, 2)


class LatentAttention(nn.Module):
    """Causal self-attention whose queries, keys and values are projected down and up again.

    Only `linear_proj` may have a bias, as in Megatron.

    Args:
        config: a model with `multi_latent_attention`.

    References:
        DeepSeek-AI 2024, "DeepSeek-V2", arXiv 2405.04434, section 2.1, equations 9 to 19.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        hidden, std = config.hidden_size, config.init_method_std
        self.key_value_sizes = (config.kv_lora_rank, config.qk_pos_emb_head_dim)
        self.linear_q_down_proj: nn.Module = nn.Identity()
        self.q_layernorm: nn.Module = nn.Identity()
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = Linear(hidden, config.q_lora_rank, bias=False, init_std=std)
            self.q_layernorm = build_norm(config, config.q_lora_rank)
        self.linear_kv_down_proj = Linear(hidden, sum(self.key_value_sizes), bias=False, init_std=std)
        self.kv_layernorm = build_norm(config, config.kv_lora_rank)
        self.qkv_up_proj = UpProjection(config)
        self.core_attention: nn.Module = build_core_attention(config)
        self.linear_proj = Linear(
            config.num_attention_heads * config.v_head_dim,
            hidden,
            bias=config.add_bias_linear,
            init_std=config.scaled_init_method_std,
        )

    def forward(self, x_BTD: Tensor, rotary: Rotary) -> Tensor:
        """Mix positions; position t sees 0..t."""
        q_BTQ = self.q_layernorm(self.linear_q_down_proj(x_BTD))
        kv_BTL, k_BTR = self.linear_kv_down_proj(x_BTD).split(self.key_value_sizes, dim=-1)
        q_BTHC, k_BTHC, v_BTHE = self.qkv_up_proj(q_BTQ, self.kv_layernorm(kv_BTL), k_BTR, rotary)
        out_BTD: Tensor = self.linear_proj(self.core_attention(q_BTHC, k_BTHC, v_BTHE))
        return out_BTD
