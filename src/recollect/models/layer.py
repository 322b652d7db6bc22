"""A transformer layer, and the one place that picks its parts."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from recollect.errors import UnsupportedModelError
from recollect.models.attention import SelfAttention
from recollect.models.config import TransformerConfig
from recollect.models.mlp import MLP
from recollect.models.norm import build_norm
from recollect.models.rotary import Rotary

__all__ = ["TransformerLayer"]


def _build_attention(config: TransformerConfig) -> nn.Module:
    if config.multi_latent_attention:
        raise UnsupportedModelError("multi_latent_attention: got True, but latent attention is not built yet.")
    return SelfAttention(config)


def _build_mlp(config: TransformerConfig, layer: int) -> nn.Module:
    if config.is_moe_layer(layer):
        raise UnsupportedModelError(
            f"num_moe_experts: got {config.num_moe_experts}, but layers with experts are not built yet."
        )
    return MLP(config)


class TransformerLayer(nn.Module):
    """Attention and MLP, each on a normalised copy and added to the residual stream.

    Args:
        config: the model.
        layer: which one it is, from 0; those of multi-token prediction come after those of the decoder.
    """

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.hidden_dropout = config.hidden_dropout
        self.input_layernorm = build_norm(config, config.hidden_size)
        self.self_attention = _build_attention(config)
        self.pre_mlp_layernorm = build_norm(config, config.hidden_size)
        self.mlp = _build_mlp(config, layer)

    def forward(self, x_BTD: Tensor, rotary: Rotary | None) -> Tensor:
        """Return the residual stream after this layer."""
        x_BTD = x_BTD + self._dropped(self.self_attention(self.input_layernorm(x_BTD), rotary))
        return x_BTD + self._dropped(self.mlp(self.pre_mlp_layernorm(x_BTD)))

    def _dropped(self, x_BTD: Tensor) -> Tensor:
        return F.dropout(x_BTD, self.hidden_dropout) if self.training and self.hidden_dropout else x_BTD
