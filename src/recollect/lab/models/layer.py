"""A transformer layer, with its attention and its MLP or experts, and the extra layers of multi-token prediction.

Those predict the tokens after the next one, in training only.

Shape legend: B batch   T positions   D hidden_size
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recollect.lab.models.attention import LatentAttention, SelfAttention
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.linear import Linear, build_norm
from recollect.lab.models.mlp import MLP, MoELayer
from recollect.lab.models.rotary import Rotary
from recollect.lab.models.router import RouterStatistics


class TransformerLayer(nn.Module):
    """Attention and MLP, each applied to the normalised residual stream and added to it.

    Args:
        config: the model.
        layer: number of the layer, from 0; the layers of multi-token prediction follow those of the decoder.
    """

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        config = config.of_layer(layer)
        self.hidden_dropout = config.hidden_dropout
        self.input_layernorm = build_norm(config, config.hidden_size)
        self.self_attention: nn.Module = (
            LatentAttention(config) if config.multi_latent_attention else SelfAttention(config)
        )
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


def shifted(tokens_BT: Tensor, places: int, fill: int) -> Tensor:
    """Shift every sequence left by `places`, and append `fill`.

    Example:
        >>> shifted(torch.tensor([[1, 2, 3]]), 1, fill=0)
        tensor([[2, 3, 0]])
    """
    return nn.functional.pad(tokens_BT[:, places:], (0, min(places, tokens_BT.shape[1])), value=fill)


class MultiTokenPredictionLayer(nn.Module):
    """One depth: combine the state of position t with the token k places later, and apply a layer.

    Args:
        config: the model.
        depth: k - 1, from 0.
    """

    def __init__(self, config: TransformerConfig, depth: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.enorm = build_norm(config, hidden)
        self.hnorm = build_norm(config, hidden)
        layer = config.num_layers + depth
        self.eh_proj: nn.Module = Linear(
            2 * hidden, hidden, bias=False, init_std=config.init_method_std, config=config.of_layer(layer)
        )
        self.transformer_layer = TransformerLayer(config, layer)
        self.final_layernorm = build_norm(config, hidden)

    def forward(
        self, x_BTD: Tensor, embedded_BTD: Tensor, rotary: Rotary | None
    ) -> tuple[Tensor, RouterStatistics | None]:
        """Return the input of the LM head and the next depth, and the router's statistics."""
        both = torch.cat((self.enorm(embedded_BTD), self.hnorm(x_BTD)), dim=-1)
        x_BTD, statistics = self.transformer_layer(self.eh_proj(both), rotary)
        return self.final_layernorm(x_BTD), statistics


class MultiTokenPrediction(nn.Module):
    """Depths 1 to `mtp_num_layers`, each building on the previous one, with the embedding and LM head of the model.

    The last positions of a sequence lack the tokens that a depth needs; their outputs are computed but excluded from the loss.

    Args:
        config: a model with `mtp_num_layers`.

    References:
        DeepSeek-AI 2024, "DeepSeek-V3", arXiv 2412.19437, section 2.2, equations 21 to 25. The embedding comes first in the
        concatenation and the residual stream is normalised once more before it, as in the released weights and in Megatron.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        depths = range(config.mtp_num_layers or 0)
        self.layers = nn.ModuleList(MultiTokenPredictionLayer(config, depth) for depth in depths)

    def forward(
        self, x_BTD: Tensor, embedded_BTD: Sequence[Tensor], rotary: Rotary | None
    ) -> tuple[list[Tensor], list[RouterStatistics | None]]:
        """Run every depth.

        Args:
            x_BTD: the normalised output of the decoder.
            embedded_BTD: for each depth k from 1, the embeddings of the tokens k places later.
            rotary: the rotation of each position.

        Returns:
            For each depth the input of the LM head, [B, T, D], and its router's statistics.
        """
        outputs, statistics = [], []
        for layer, embedded in zip(self.layers, embedded_BTD, strict=True):
            x_BTD, layer_statistics = layer(x_BTD, embedded, rotary)
            outputs.append(x_BTD)
            statistics.append(layer_statistics)
        return outputs, statistics
