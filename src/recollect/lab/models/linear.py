"""Linear layer and embedding with a given initialisation, and norms; all with weights cast to the compute dtype.

Weights keep their own dtype; each product casts them to the dtype of its input. A model with fp32 weights and bf16 activations
thus trains as under autocast, but without autocast's global state and without its cache, which holds all bf16 copies until the
end of forward: here, a copy is one more value that a plan can recompute. Norms compute in fp32 inside. Products in 8 bits cast
the weights as they are.
"""

from collections.abc import Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.fp8 import Fp8Product


class Linear(nn.Linear):
    """A matrix product with an optional bias; in 8 bits with the `fp8` of `config`, otherwise in the input's dtype."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        init_std: float,
        config: TransformerConfig | None = None,
    ) -> None:
        self.init_std = init_std  # before the base class, which draws the weights
        super().__init__(in_features, out_features, bias=bias)
        self.fp8: nn.Module | None = None if config is None or config.fp8 is None else Fp8Product(config)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.init_std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.weight, self.bias)

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        bias = None if bias is None else bias.to(x.dtype)
        if self.fp8 is None:
            return F.linear(x, weight.to(x.dtype), bias)
        out: Tensor = self.fp8(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])
        return out if bias is None else out + bias


class SeparateLinears(nn.ModuleList):
    """Products of one input with several matrices, in place of one product with a fused matrix."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(linear(x) for linear in self)


def build_projection(config: TransformerConfig, sizes: Sequence[int], *, bias: bool) -> Linear | SeparateLinears:
    """Return a projection of the residual stream to parts of these sizes: one product for all, or one for each."""
    made = partial(Linear, config.hidden_size, bias=bias, init_std=config.init_method_std, config=config)
    return SeparateLinears(map(made, sizes)) if config.separate_projections and len(sizes) > 1 else made(sum(sizes))


class Embedding(nn.Embedding):
    """A vector for each of `num_embeddings` ids."""

    def __init__(self, num_embeddings: int, channels: int, *, init_std: float) -> None:
        self.init_std = init_std
        super().__init__(num_embeddings, channels)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.init_std)


class RMSNorm(nn.RMSNorm):
    """Root mean square norm; one fused kernel on CUDA, plain ops on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class LayerNorm(nn.LayerNorm):
    """Normalise to mean 0 and variance 1, then scale and shift."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


def build_norm(config: TransformerConfig, channels: int) -> LayerNorm | RMSNorm:
    kind = LayerNorm if config.normalization == "LayerNorm" else RMSNorm
    return kind(channels, config.layernorm_epsilon)
