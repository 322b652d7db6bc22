"""The MLP of a layer, and its activation.

Shape legend: F width inside, 2F before a gated activation
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.linear import Linear

__all__ = ["MLP", "Activation"]

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}


class Activation(nn.Module):
    """Activation of an MLP or an expert: f(x), or with a gate f(first half) * second half.

    Args:
        config: the model.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.function = _FUNCTIONS[config.activation_func]
        self.is_gated = config.gated_linear_unit

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., F], or [..., 2F] with a gate, to [..., F]."""
        if not self.is_gated:
            return self.function(x)
        gate, linear = x.chunk(2, dim=-1)
        return self.function(gate) * linear


class MLP(nn.Module):
    """Two matrix products with an activation between them, applied to each position.

    Args:
        config: the model.
        ffn_hidden_size: F; None: that of the model.
    """

    def __init__(self, config: TransformerConfig, ffn_hidden_size: int | None = None) -> None:
        super().__init__()
        width = config.ffn_hidden_size if ffn_hidden_size is None else ffn_hidden_size
        into = 2 * width if config.gated_linear_unit else width
        has_bias = config.add_bias_linear
        self.linear_fc1 = Linear(config.hidden_size, into, bias=has_bias, init_std=config.init_method_std)
        self.activation_func = Activation(config)
        self.linear_fc2 = Linear(width, config.hidden_size, bias=has_bias, init_std=config.scaled_init_method_std)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] to [..., D]."""
        out: Tensor = self.linear_fc2(self.activation_func(self.linear_fc1(x)))
        return out
