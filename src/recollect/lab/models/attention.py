"""Causal self-attention: with grouped queries, or latent, which projects one small vector per position up to all heads.

The core, softmax(QK^T / sqrt(C)) V with later positions masked, is one kernel, or goes op by op. Both are modules without
parameters, which gives their ops a module path. Megatron recomputes them as `core_attn`: softmax, dropout mask and dropped
probabilities take 5 bytes per head and pair of positions in bf16 (Korthikanti et al. 2022, arXiv 2205.05198, section 4.1),
unless the kernel never stores them. There may be fewer queries than keys, for the last positions.

Shape legend: B batch   T, S positions, of queries and of keys   D hidden_size   H query heads   K key and value heads
    G = H / K   X = G * T   N = B * K   C channels of a query and key head   E channels of a value head
    Of latent attention: Q q_lora_rank (D without one)   L kv_lora_rank   R = qk_pos_emb_head_dim, the rotated ones of C

Rotary positions (Su et al. 2021, arXiv 2104.09864) rotate pairs of query and key channels by their position.
"""

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias, CausalVariant

from recollect._torch_private import disable_torch_dispatch
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.config_checks import FP8_MULTIPLES
from recollect.lab.models.linear import Linear, build_norm, build_projection
from recollect.lab.models.sequence import WholeSequence
from recollect.recording.fake_model import kernels_of


class Rotary(NamedTuple):
    """The rotation of each position, shared by all layers of a forward."""

    cos_T1C: Tensor
    """Cosines, [T, 1, C], each angle twice, in the layout of the channels."""
    sin_T1C: Tensor
    is_interleaved: bool
    """Whether channels 2i and 2i + 1 are a pair, instead of i and i + C / 2."""


class RotaryEmbedding(nn.Module):
    """Cosines and sines of the rotary positions, computed once per forward."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.channels = config.qk_pos_emb_head_dim if config.multi_latent_attention else config.kv_channels
        self.base = config.rotary_base
        self.sequence = WholeSequence()
        self.is_interleaved = config.rotary_interleaved

    def forward(self, x_BTD: Tensor, num_positions: int | None = None) -> Rotary:
        """Return the rotation of this rank's positions, in the dtype and on the device of `x_BTD`.

        `num_positions`: length of the whole sequence; None: that of `x_BTD`, which may be a part of it.
        """
        # Computed each time: `model.bfloat16()` would cast a buffer, and bf16 cannot tell large angles apart.
        channel = torch.arange(0, self.channels, 2, device=x_BTD.device, dtype=torch.float32)
        count = x_BTD.shape[1] if num_positions is None else num_positions
        position = self.sequence.own(torch.arange(count, device=x_BTD.device, dtype=torch.float32))
        angle = torch.outer(position, self.base ** (-channel / self.channels))
        both = angle.repeat_interleave(2, dim=-1) if self.is_interleaved else torch.cat((angle, angle), dim=-1)
        angle_T1C = both.unsqueeze(1)
        return Rotary(angle_T1C.cos().to(x_BTD.dtype), angle_T1C.sin().to(x_BTD.dtype), self.is_interleaved)


def rotate(x_BTHC: Tensor, rotary: Rotary) -> Tensor:
    """Rotate each pair of channels of `x_BTHC` by the angle of its position."""
    if rotary.is_interleaved:
        even, odd = x_BTHC.unflatten(-1, (-1, 2)).unbind(-1)
        rotated = torch.stack((-odd, even), dim=-1).flatten(-2)
    else:
        first, second = x_BTHC.chunk(2, dim=-1)
        rotated = torch.cat((-second, first), dim=-1)
    return x_BTHC * rotary.cos_T1C + rotated * rotary.sin_T1C


class SelfAttention(nn.Module):
    """Attention with one matrix product for queries, keys and values, in that order; or one for each."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.kv_channels = config.kv_channels
        self.is_rotary = config.position_embedding_type == "rope"
        query_size = config.num_attention_heads * config.kv_channels
        group_size = config.num_query_groups * config.kv_channels
        self.sizes: tuple[int, ...] = (query_size, group_size, group_size)
        qkv_bias = config.add_bias_linear or config.add_qkv_bias
        self.linear_qkv = build_projection(config, self.sizes, bias=qkv_bias)
        # A model without these norms has no such modules.
        if config.qk_layernorm:
            self.q_layernorm = build_norm(config, config.kv_channels)
            self.k_layernorm = build_norm(config, config.kv_channels)
        self.has_norms = config.qk_layernorm
        self.core_attention: nn.Module = build_core_attention(config)
        out_std = config.scaled_init_method_std
        self.linear_proj = Linear(
            query_size, config.hidden_size, bias=config.add_bias_linear, init_std=out_std, config=config
        )

    def forward(self, x_BTD: Tensor, rotary: Rotary | None) -> Tensor:
        projected = self.linear_qkv(x_BTD)
        parts = projected if isinstance(projected, tuple) else projected.split(self.sizes, dim=-1)
        q_BTHC, k_BTKC, v_BTKC = (part.unflatten(-1, (-1, self.kv_channels)) for part in parts)
        if self.has_norms:
            q_BTHC, k_BTKC = self.q_layernorm(q_BTHC), self.k_layernorm(k_BTKC)
        if rotary is not None and self.is_rotary:
            q_BTHC, k_BTKC = rotate(q_BTHC, rotary), rotate(k_BTKC, rotary)
            # Copy: as a view, the value would keep the unrotated queries and keys alive, which backward does not need.
            v_BTKC = v_BTKC.contiguous()
        return self.linear_proj(self.core_attention(q_BTHC, k_BTKC, v_BTKC))


class UpProjection(nn.Module):
    """Project latent vectors to the queries, keys and values of all heads; Megatron recomputes it as `mla_up_proj`."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        heads, std = config.num_attention_heads, config.init_method_std
        self.heads = heads
        self.query_sizes = (config.qk_head_dim, config.qk_pos_emb_head_dim)
        self.key_value_sizes = (config.qk_head_dim, config.v_head_dim)
        latent = config.hidden_size if config.q_lora_rank is None else config.q_lora_rank
        linear = functools.partial(Linear, bias=False, init_std=std, config=config)
        self.linear_q_up_proj = linear(latent, heads * sum(self.query_sizes))
        self.linear_kv_up_proj = linear(config.kv_lora_rank, heads * sum(self.key_value_sizes))

    def forward(self, q_BTQ: Tensor, kv_BTL: Tensor, k_BTR: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, T, H, C], keys [B, T, H, C] and values [B, T, H, E]; all heads share `k_BTR`."""
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
    """Concatenate parts of heads, contiguous per head as attention expects: it saves these and no copies."""
    return torch.cat([part.transpose(1, 2) for part in parts_BTHC], dim=-1).transpose(1, 2)


class LatentAttention(nn.Module):
    """Causal self-attention whose queries, keys and values are projected down and up again.

    Only `linear_proj` may have a bias, as in Megatron.

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
            self.linear_q_down_proj = Linear(hidden, config.q_lora_rank, bias=False, init_std=std, config=config)
            self.q_layernorm = build_norm(config, config.q_lora_rank)
        width = sum(self.key_value_sizes)
        is_divided = width % FP8_MULTIPLES[config.fp8_recipe] == 0
        self.linear_kv_down_proj = Linear(
            hidden, width, bias=False, init_std=std, config=config if is_divided else None
        )
        self.kv_layernorm = build_norm(config, config.kv_lora_rank)
        self.qkv_up_proj = UpProjection(config)
        self.core_attention: nn.Module = build_core_attention(config)
        values = config.num_attention_heads * config.v_head_dim
        out_std = config.scaled_init_method_std
        self.linear_proj = Linear(values, hidden, bias=config.add_bias_linear, init_std=out_std, config=config)

    def forward(self, x_BTD: Tensor, rotary: Rotary) -> Tensor:
        q_BTQ = self.q_layernorm(self.linear_q_down_proj(x_BTD))
        kv_BTL, k_BTR = self.linear_kv_down_proj(x_BTD).split(self.key_value_sizes, dim=-1)
        q_BTHC, k_BTHC, v_BTHE = self.qkv_up_proj(q_BTQ, self.kv_layernorm(kv_BTL), k_BTR, rotary)
        return self.linear_proj(self.core_attention(q_BTHC, k_BTHC, v_BTHE))


class CoreAttention(nn.Module):
    """Mixes the values [B, S, K, E] of positions 0..t for each position t, into [B, T, H * E].

    `are_last`: whether the queries belong to the last positions.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout


class FusedCoreAttention(CoreAttention):
    """Attention by `scaled_dot_product_attention`; PyTorch chooses the kernel by device, dtype and dropout.

    On a CPU no kernel supports dropout, and PyTorch computes op by op.
    """

    def forward(self, q_BTHC: Tensor, k_BSKC: Tensor, v_BSKE: Tensor, *, are_last: bool = False) -> Tensor:
        channels, width = q_BTHC.shape[-1], v_BSKE.shape[-1]
        is_padded = width < channels and not q_BTHC.is_cuda
        if is_padded:
            # A CPU has kernels for heads of one size only; without one it would hold all scores.
            v_BSKE = F.pad(v_BSKE, (0, channels - width))
        mixed_BHTE = F.scaled_dot_product_attention(
            q_BTHC.transpose(1, 2),
            k_BSKC.transpose(1, 2),
            v_BSKE.transpose(1, 2),
            dropout_p=self.dropout if self.training else 0.0,
            attn_mask=_last_positions(q_BTHC, k_BSKC) if are_last else None,
            is_causal=not are_last,
            enable_gqa=q_BTHC.shape[2] != k_BSKC.shape[2],
        )
        if is_padded:
            mixed_BHTE = mixed_BHTE[..., :width]
        return mixed_BHTE.transpose(1, 2).flatten(2)


class UnfusedCoreAttention(CoreAttention):
    """Attention op by op; scores, probabilities and dropped probabilities are separate values of size T * S."""

    def forward(self, q_BTHC: Tensor, k_BSKC: Tensor, v_BSKE: Tensor, *, are_last: bool = False) -> Tensor:
        num_positions, groups = q_BTHC.shape[1], k_BSKC.shape[2]
        # The G heads of a group form one matrix: no key or value is copied for them.
        q_BKXC = q_BTHC.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        # One op scales, multiplies and masks: unmasked scores never exist, and recompute runs a single op.
        scores_NXS = torch.baddbmm(
            _later_positions(q_BKXC, num_positions, k_BSKC.shape[1] if are_last else None),
            q_BKXC.flatten(0, 1),
            k_BSKC.permute(0, 2, 3, 1).flatten(0, 1),
            alpha=q_BTHC.shape[-1] ** -0.5,
        )
        probabilities_BKGTS = scores_NXS.unflatten(1, (-1, num_positions)).softmax(dim=-1).unflatten(0, (-1, groups))
        if self.training and self.dropout:
            probabilities_BKGTS = F.dropout(probabilities_BKGTS, self.dropout)
        mixed_BKXE = probabilities_BKGTS.flatten(2, 3) @ v_BSKE.transpose(1, 2)
        return mixed_BKXE.unflatten(2, (-1, num_positions)).permute(0, 3, 1, 2, 4).flatten(2)


def _last_positions(q_BTHC: Tensor, k_BSKC: Tensor) -> Tensor:
    """Return the mask that aligns the queries with the last positions."""
    num_queries, num_keys = q_BTHC.shape[1], k_BSKC.shape[1]
    if kernels_of(q_BTHC) == "cuda":
        return bias_of_last_positions(num_queries, num_keys)
    position = torch.arange(num_keys, device=q_BTHC.device)
    return position <= position[num_keys - num_queries :].unsqueeze(1)


def bias_of_last_positions(num_queries: int, num_keys: int) -> Tensor:
    """Return the arguments that align the queries with the last positions, for kernels that need no mask for it."""
    # Results of ops under a dispatch mode, such as a recording's, do not become tensors of a different class.
    with disable_torch_dispatch():
        # `causal_lower_right` would set memory aside for a mask, 32 GiB for 16,384 of 262,144 positions.
        bias: CausalBias = CausalBias.__new__(CausalBias)
        CausalBias.__init__(bias, CausalVariant.LOWER_RIGHT, num_queries, num_keys)
    return bias


def _later_positions(q_BKXC: Tensor, num_positions: int, num_keys: int | None) -> Tensor:
    """Return [X, S] with the least finite number where the key is later than the query, else zero; X = G * T queries.

    A plan can recompute these ops; a triangle made with `torch.full` would be kept, as constants are.
    """
    position = torch.arange(num_keys or num_positions, device=q_BKXC.device)
    query = position if num_keys is None else position[num_keys - num_positions :]
    # In fp32 until the last op: PyTorch converts the booleans to fp32.
    least = max(torch.finfo(q_BKXC.dtype).min, torch.finfo(torch.float32).min)
    mask_TS = (position > query.unsqueeze(1)) * least
    return mask_TS.to(q_BKXC.dtype).expand(q_BKXC.shape[2] // num_positions, -1, -1).flatten(0, 1)


def build_core_attention(config: TransformerConfig) -> FusedCoreAttention | UnfusedCoreAttention:
    """Return a module that maps queries [B, T, H, C], keys [B, T, K, C] and values [B, T, K, E] to [B, T, H * E].

    There may be more keys and values than queries.
    """
    kind = FusedCoreAttention if config.core_attention == "fused" else UnfusedCoreAttention
    return kind(config.attention_dropout)
