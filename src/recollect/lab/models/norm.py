"""LayerNorm and RMSNorm in the dtype of their input, with fp32 arithmetic."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from recollect.lab.models.config import TransformerConfig

__all__ = ["LayerNorm", "RMSNorm", "build_norm"]


class RMSNorm(nn.RMSNorm):
    """Root mean square norm; one fused kernel on CUDA, plain ops on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class LayerNorm(nn.LayerNorm):
    """Normalise to mean 0 and variance 1, then scale and shift."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


def build_norm(config: TransformerConfig, channels: int) -> LayerNorm | RMSNorm:
    """Return a new norm of the model's kind over so many channels, with scale 1 and shift 0."""
    kind = LayerNorm if config.normalization == "LayerNorm" else RMSNorm
    return kind(channels, config.layernorm_epsilon)
