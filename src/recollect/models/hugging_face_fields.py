"""Reading and checking the fields of Hugging Face's `config.json`. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from recollect.errors import UnsupportedModelError
from recollect.models.config import TransformerConfig

__all__ = ["must_be_equal", "rotary_base_of", "same_fields", "wanted"]

# How a model is trained, not what it computes; their configurations do not say it.
_OURS_ALONE = frozenset(
    {"hidden_dropout", "core_attention", "moe_grouped_gemm", "moe_aux_loss_coeff", "moe_router_load_balancing_type"}
    | {"moe_router_bias_update_rate", "mtp_loss_scaling_factor", "moe_router_dtype"}
)


def same_fields(fields: Mapping[str, Any], names: Mapping[str, str], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields that mean the same here and there.

    Args:
        fields: theirs.
        names: theirs by ours.
        defaults: theirs, where a file leaves them out.

    Returns:
        Values by our names.

    Example:
        >>> same_fields({"hidden": 8}, {"hidden_size": "hidden", "num_layers": "layers"}, {"layers": 2})
        {'hidden_size': 8, 'num_layers': 2}
    """
    return {ours: fields[theirs] if theirs in fields else defaults[theirs] for ours, theirs in names.items()}


def wanted(fields: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Refuse a configuration that asks for what no model of ours does.

    Args:
        fields: theirs; one that is not there has the value that is wanted.
        values: what is wanted.

    Raises:
        UnsupportedModelError: names the first field with another value.

    Example:
        >>> wanted({"hidden_act": "silu"}, {"hidden_act": "silu", "attention_bias": False})
    """
    for name, value in values.items():
        if name in fields and fields[name] != value:
            raise UnsupportedModelError(
                f"config.json: {name} is {fields[name]!r}, expected {value!r}, the only one that the reference models know."
            )


def rotary_base_of(fields: Mapping[str, Any], default: float) -> float:
    """Read the base of the rotary frequencies, which transformers 5 holds in a dictionary.

    Args:
        fields: theirs.
        default: where they do not say it.

    Returns:
        The base.

    Raises:
        UnsupportedModelError: the frequencies are scaled, for longer sequences than the model was trained on.

    Example:
        >>> rotary_base_of({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, default=1e4)
        1000000.0
    """
    parameters = fields.get("rope_parameters") or {}
    scaling = fields.get("rope_scaling") or {}
    kind = {**scaling, **parameters}.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        raise UnsupportedModelError(
            f"config.json: the rotary frequencies are scaled ({kind!r}), expected 'default': the reference models train on "
            "sequences as long as those that the frequencies were made for. Take the field out to load the weights as they are."
        )
    return float(parameters.get("rope_theta", fields.get("rope_theta", default)))


def must_be_equal(config: TransformerConfig, told: TransformerConfig, architecture: str) -> None:
    """Refuse to write a configuration that would be read as another model.

    Args:
        config: what is to be written.
        told: what would be read.
        architecture: theirs.

    Raises:
        UnsupportedModelError: names the first field that they cannot express.

    Example:
        >>> from recollect.models.sizes import NAMED_CONFIGS
        >>> must_be_equal(NAMED_CONFIGS["tiny"], NAMED_CONFIGS["tiny"], "Llama")
    """
    for field in dataclasses.fields(config):
        ours, theirs = getattr(config, field.name), getattr(told, field.name)
        if ours != theirs and field.name not in _OURS_ALONE:
            raise UnsupportedModelError(
                f"TransformerConfig.{field.name}: got {ours!r}, expected {theirs!r}, because Hugging Face's {architecture} "
                "has no other."
            )
