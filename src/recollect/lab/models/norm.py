"""LayerNorm and RMSNorm in the dtype of their input, with fp32 arithmetic."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recollect.lab.models.config import TransformerConfig

__all__ = ["LayerNorm", "RMSNorm", "build_norm"]


class RMSNorm(nn.Module):
    """Root mean square norm; one fused kernel on CUDA, plain ops on a CPU."""

    def __init__(self, channels: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.epsilon)


class LayerNorm(nn.Module):
    """Normalise to mean 0 and variance 1, then scale and shift."""

    def __init__(self, channels: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return F.layer_norm(x, self.weight.shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.epsilon)


def build_norm(config: TransformerConfig, channels: int) -> LayerNorm | RMSNorm:
    """Return a new norm of the model's kind over so many channels, with scale 1 and shift 0."""
    kind = LayerNorm if config.normalization == "LayerNorm" else RMSNorm
    return kind(channels, config.layernorm_epsilon)
