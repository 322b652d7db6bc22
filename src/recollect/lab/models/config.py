"""Describe a transformer in one frozen dataclass with Megatron's field names. Imports no torch.

Names, meanings and defaults are those of `TransformerConfig`, `MLATransformerConfig` and `GPTModel` in Megatron Core, so a
Megatron configuration can be used unchanged. Two things differ: `core_attention` is new, and activations are given by name, not
as functions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from recollect.lab.models.config_checks import check
from recollect.lab.models.config_fields import TransformerFields
from recollect.lab.models.parameter_counts import active_parameters, all_parameters

__all__ = ["TransformerConfig"]


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(TransformerFields):
    """Dimensions and parts of a decoder-only transformer: GPT, Llama, Mixtral, DeepSeek-V3 and mixtures of them.

    The defaults are GPT's: LayerNorm, GELU, learned positions, biases and dropout. `recollect.lab.models.sizes` has the
    published models by name.

    Raises:
        ValueError: a field is out of range, or fields clash; the message names them.

    Example:
        >>> config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=256)
        >>> config.ffn_hidden_size, config.kv_channels, config.num_query_groups
        (256, 16, 4)
        >>> config.num_parameters
        263936
    """

    def __post_init__(self) -> None:
        derived = {
            "num_query_groups": self.num_attention_heads,
            "ffn_hidden_size": 4 * self.hidden_size,
            "kv_channels": self.hidden_size // max(self.num_attention_heads, 1),
            "moe_ffn_hidden_size": self.ffn_hidden_size or 4 * self.hidden_size,
        }
        derived = {name: value for name, value in derived.items() if not getattr(self, name)}
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_derived", frozenset(derived))  # not a field: it does not describe the model
        if not isinstance(self.moe_layer_freq, int):
            object.__setattr__(self, "moe_layer_freq", tuple(self.moe_layer_freq))
        check(self, has_own_kv_channels="kv_channels" not in derived)

    def changed(self, **changes: Any) -> TransformerConfig:
        """Return a configuration with changed fields; unlike `dataclasses.replace`, derive again what was derived.

        With a new `num_layers`, a list in `moe_layer_freq` is cut, or extended by its last entry.

        Args:
            **changes: fields and their new values.

        Raises:
            ValueError: fields clash.
            TypeError: an unknown field.

        Example:
            >>> config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=256)
            >>> config.changed(hidden_size=128).ffn_hidden_size
            512
        """
        given = self.given()
        pattern = given.get("moe_layer_freq")
        if "num_layers" in changes and isinstance(pattern, tuple):
            num_layers = changes["num_layers"]
            given["moe_layer_freq"] = (*pattern[:num_layers], *pattern[-1:] * (num_layers - len(pattern)))
        return TransformerConfig(**{**given, **changes})

    def given(self) -> dict[str, Any]:
        """Return the fields that were given, not derived from others, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in vars(self)["_derived"]}

    @property
    def scaled_init_method_std(self) -> float:
        """Standard deviation of new matrices that write into the residual stream: `linear_proj` and `linear_fc2`."""
        return self.init_method_std / math.sqrt(2 * self.num_layers)

    @property
    def num_parameters(self) -> int:
        """Exact number of trainable parameters, including multi-token prediction; a tied matrix counts once."""
        return all_parameters(self)

    @property
    def num_active_parameters(self) -> int:
        """Parameters used to predict one token: of the routed experts, `moe_router_topk`."""
        return active_parameters(self)
