"""Rotary positions (Su et al. 2021, arXiv 2104.09864): rotate pairs of query and key channels by their position.

Shape legend: B batch   T positions   H heads   C rotated channels
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.sequence import WholeSequence


class Rotary(NamedTuple):
    """The rotation of each position, shared by all layers of a forward.

    Attributes:
        cos_T1C: cosines, [T, 1, C], each angle twice, in the layout of the channels.
        sin_T1C: sines, likewise.
        is_interleaved: whether channels 2i and 2i + 1 are a pair, instead of i and i + C / 2.
    """

    cos_T1C: Tensor
    sin_T1C: Tensor
    is_interleaved: bool


class RotaryEmbedding(nn.Module):
    """Cosines and sines of the rotary positions, computed once per forward.

    Args:
        config: the model.

    Attributes:
        sequence: what this rank has of each sequence.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.channels = config.qk_pos_emb_head_dim if config.multi_latent_attention else config.kv_channels
        self.base = config.rotary_base
        self.sequence = WholeSequence()
        self.is_interleaved = config.rotary_interleaved

    def forward(self, x_BTD: Tensor, num_positions: int | None = None) -> Rotary:
        """Return the rotation of this rank's positions, in the dtype and on the device of `x_BTD`.

        `num_positions`: of the whole sequence; None for those of `x_BTD`, which may be a part of it.
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
