"""All rules, and the two checks that apply them: of a configuration alone, and of one within a training."""

from __future__ import annotations

from dataclasses import fields, replace

from recollect.errors import ConfigError, ConfigWarning
from recollect.integrations.megatron.recompute_settings import RecomputeSettings
from recollect.integrations.megatron.rule import Clash, Rule
from recollect.integrations.megatron.rules_cuda_graph import CUDA_GRAPH_RULES
from recollect.integrations.megatron.rules_offload import OFFLOAD_RULES
from recollect.integrations.megatron.rules_others import OTHER_RULES
from recollect.integrations.megatron.rules_recompute import RECOMPUTE_RULES
from recollect.integrations.megatron.training_setting import TrainingSetting
from recollect.warning import warn_user

__all__ = ["RULES", "check", "report"]

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


_TYPE_RULE = Rule(
    when="a value of another type than the setting's, such as the string `'false'`",
    megatron="nothing; the string is true",
    why="meaningless",
    alone=_types,
)
_RULES = {"types": _TYPE_RULE, **RECOMPUTE_RULES, **OFFLOAD_RULES, **CUDA_GRAPH_RULES, **OTHER_RULES}
RULES: tuple[Rule, ...] = tuple(replace(rule, name=name) for name, rule in _RULES.items())
"""In the order in which they are checked: rules about single values first."""


def check(config: RecomputeSettings, setting: TrainingSetting | None = None) -> None:
    """Check the rules that compare the configuration with a setting; without one, those that need only the configuration."""
    for rule in RULES:
        if rule.needs_training == (setting is not None):
            report(rule.name, rule.clash(config, setting))


def report(name: str, clash: Clash | None) -> None:
    """Raise or warn, according to a rule, if there is a clash."""
    if clash is None:
        return
    error = ConfigError(rule=name, settings=clash.settings, reason=clash.reason, advice=clash.advice)
    if _RULES[name].ours == "error":
        raise error
    warn_user(str(error), ConfigWarning)
