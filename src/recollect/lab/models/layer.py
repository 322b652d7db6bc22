"""A transformer layer; chooses its attention and its MLP or experts."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from recollect.lab.models.attention import LatentAttention, SelfAttention
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.mlp import MLP
from recollect.lab.models.moe import MoELayer
from recollect.lab.models.norm import build_norm
from recollect.lab.models.rotary import Rotary
from recollect.lab.models.router import RouterStatistics

__all__ = ["TransformerLayer"]


def _build_attention(config: TransformerConfig) -> nn.Module:
    return LatentAttention(config) if config.multi_latent_attention else SelfAttention(config)


class TransformerLayer(nn.Module):
    """Attention and MLP, each applied to the normalised residual stream and added to it.

    Args:
        config: the model.
        layer: number of the layer, from 0; the layers of multi-token prediction follow those of the decoder.
    """

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.hidden_dropout = config.hidden_dropout
        self.input_layernorm = build_norm(config, config.hidden_size)
        self.self_attention = _build_attention(config)
        self.pre_mlp_layernorm = build_norm(config, config.hidden_size)
        self.mlp: nn.Module = MoELayer(config) if config.is_moe_layer(layer) else MLP(config)

    def forward(self, x_BTD: Tensor, rotary: Rotary | None) -> tuple[Tensor, RouterStatistics | None]:
        """Return the residual stream after this layer, and the router's statistics if the layer has experts."""
        x_BTD = x_BTD + self._dropped(self.self_attention(self.input_layernorm(x_BTD), rotary))
        out = self.mlp(self.pre_mlp_layernorm(x_BTD))
        out_BTD, statistics = out if isinstance(out, tuple) else (out, None)
        return x_BTD + self._dropped(out_BTD), statistics

    def _dropped(self, x_BTD: Tensor) -> Tensor:
        return F.dropout(x_BTD, self.hidden_dropout) if self.training and self.hidden_dropout else x_BTD
