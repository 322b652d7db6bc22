"""Reading and checking the fields of Hugging Face's `config.json`. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from recollect.errors import UnsupportedModelError
from recollect.lab.models.config import TransformerConfig

__all__ = ["DECODER_FIELDS", "checked_fields", "meaning", "rotary_base_of", "same_fields", "wanted"]

# What Llama and those that came after it call alike: ours, and theirs where it means the same.
DECODER_FIELDS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "layernorm_epsilon": "rms_norm_eps",
    "attention_dropout": "attention_dropout",
    "init_method_std": "initializer_range",
    "share_embeddings_and_output_weights": "tie_word_embeddings",
}

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


def meaning(name: str, value: Any, meanings: Mapping[str, str]) -> str:
    """Translate a word of theirs.

    Args:
        name: of the field.
        value: what it says.
        meanings: our words by theirs.

    Returns:
        Our word.

    Raises:
        UnsupportedModelError: it is none of them.

    Example:
        >>> meaning("hidden_act", "gelu_new", {"gelu_new": "gelu_tanh"})
        'gelu_tanh'
    """
    if value not in meanings:
        raise UnsupportedModelError(f"config.json: {name} is {value!r}, expected one of {', '.join(sorted(meanings))}.")
    return meanings[value]


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


def checked_fields(
    config: TransformerConfig,
    names: Mapping[str, str],
    others: Mapping[str, Any],
    *,
    read: Callable[[Mapping[str, Any]], TransformerConfig],
    architecture: str,
) -> dict[str, Any]:
    """Write a configuration in their words, unless it would be read as another model.

    Args:
        config: ours.
        names: theirs by ours, of the fields that mean the same.
        others: their further fields.
        read: reads what is written.
        architecture: theirs, for the message.

    Returns:
        Values by their names.

    Raises:
        UnsupportedModelError: names the first field that they cannot express.

    Example:
        >>> from recollect.lab.models.sizes import NAMED_CONFIGS
        >>> tiny = NAMED_CONFIGS["tiny"]
        >>> checked_fields(tiny, {"num_layers": "layers"}, {"heads": 4}, read=lambda fields: tiny, architecture="Llama")
        {'layers': 2, 'heads': 4}
    """
    fields = {theirs: getattr(config, ours) for ours, theirs in names.items()} | dict(others)
    told = read(fields)
    for field in dataclasses.fields(config):
        ours, theirs = getattr(config, field.name), getattr(told, field.name)
        if ours != theirs and field.name not in _OURS_ALONE:
            raise UnsupportedModelError(
                f"TransformerConfig.{field.name}: got {ours!r}, expected {theirs!r}, because Hugging Face's {architecture} "
                "has no other."
            )
    return fields
