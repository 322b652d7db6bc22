"""Causal core attention, softmax(QK^T / sqrt(C)) V with later positions masked: in one kernel, or op by op.

Both are modules without parameters, so that their ops have a module path. Megatron recomputes them as `core_attn`: softmax,
dropout mask and dropped probabilities take 5 bytes per head and pair of positions in bf16 (Korthikanti et al. 2022, arXiv
2205.05198, section 4.1), unless the kernel never stores them.

There may be fewer queries than keys, as those of the last positions.

Shape legend: B batch   T, S positions of queries and keys   H query heads   K key and value heads   G = H / K
    C channels of a query and key head   E channels of a value head   X = G * T   N = B * K
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from recollect._torch_private import disable_torch_dispatch
from recollect.lab.models.config import TransformerConfig

__all__ = ["FusedCoreAttention", "UnfusedCoreAttention", "bias_of_last_positions", "build_core_attention"]


class FusedCoreAttention(nn.Module):
    """Attention by `scaled_dot_product_attention`; PyTorch chooses the kernel by device, dtype and dropout.

    On a CPU no kernel supports dropout, and PyTorch computes op by op.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, q_BTHC: Tensor, k_BSKC: Tensor, v_BSKE: Tensor, *, are_last: bool = False) -> Tensor:
        """Mix the values of positions 0..t for each position t, into [B, T, H * E].

        `are_last`: whether the queries are those of the last positions.
        """
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


class UnfusedCoreAttention(nn.Module):
    """Attention op by op; scores, probabilities and dropped probabilities are separate values of size T * S."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, q_BTHC: Tensor, k_BSKC: Tensor, v_BSKE: Tensor, *, are_last: bool = False) -> Tensor:
        """Mix the values of positions 0..t for each position t, into [B, T, H * E].

        `are_last`: whether the queries are those of the last positions.
        """
        num_positions, groups = q_BTHC.shape[1], k_BSKC.shape[2]
        # The G heads of a group form one matrix, so that no key or value is copied for them.
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
        mixed_BTKGE: Tensor = mixed_BKXE.unflatten(2, (-1, num_positions)).permute(0, 3, 1, 2, 4)
        return mixed_BTKGE.flatten(2)


def _last_positions(q_BTHC: Tensor, k_BSKC: Tensor) -> Tensor:
    """Return what tells a kernel that the queries are those of the last positions."""
    num_queries, num_keys = q_BTHC.shape[1], k_BSKC.shape[1]
    if q_BTHC.is_cuda:
        return bias_of_last_positions(num_queries, num_keys)
    position = torch.arange(num_keys, device=q_BTHC.device)
    return position <= position[num_keys - num_queries :].unsqueeze(1)


def bias_of_last_positions(num_queries: int, num_keys: int) -> Tensor:
    """Return what tells kernels that know of it, and then need no mask, that the queries are those of the last positions."""
    # Of what an op of a dispatch mode returns, such as a recording's, PyTorch makes no tensor of another class.
    with disable_torch_dispatch():
        bias: Tensor = causal_lower_right(num_queries, num_keys)
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
    """Return the core attention of a model.

    Args:
        config: the model.

    Returns:
        A module that maps queries [B, T, H, C], keys [B, T, K, C] and values [B, T, K, E] to [B, T, H * E]; there may be more
        keys and values than queries.
    """
    kind = FusedCoreAttention if config.core_attention == "fused" else UnfusedCoreAttention
    return kind(config.attention_dropout)
