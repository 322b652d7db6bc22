"""The rule about the type of every setting."""

from __future__ import annotations

from dataclasses import fields

from recollect.integrations.megatron.recompute_settings import RecomputeSettings
from recollect.integrations.megatron.rule import Clash, Rule

__all__ = ["TYPE_RULES"]

_OPTIONAL_NUMBERS = (
    "mhc_recompute_layer_num",
    "num_microbatches_with_partial_activation_checkpoints",
    "fine_grained_offloading_max_inflight_offloads",
)


def _types(config: RecomputeSettings) -> Clash | None:
    for field in fields(config):
        value, default = getattr(config, field.name), field.default
        if isinstance(default, bool):
            expected, is_right = "True or False", isinstance(value, bool)
        elif isinstance(default, int):
            expected, is_right = "a whole number", type(value) is int
        elif isinstance(default, float):
            expected, is_right = "a number", type(value) in (int, float)
        elif field.name in _OPTIONAL_NUMBERS:
            expected, is_right = "a whole number or None", value is None or type(value) is int
        else:
            continue
        if not is_right:
            return Clash({field.name: value}, f"{type(value).__name__} is the wrong type", f"Set it to {expected}.")
    return None


TYPE_RULES = (
    Rule(
        name="types",
        when="a value of another type than the setting's, such as the string `'false'`",
        megatron="nothing; the string is true",
        ours="error",
        why="meaningless",
        alone=_types,
    ),
)
