"""All rules, and the two checks that apply them: of a configuration alone, and of one within a training."""

from __future__ import annotations

from dataclasses import fields, replace

from recollect.errors import ConfigError, ConfigWarning
from recollect.integrations.megatron.recompute_settings import RecomputeSettings
from recollect.integrations.megatron.rule import Clash, Rule
from recollect.integrations.megatron.rules_cuda_graph import CUDA_GRAPH_RULES
from recollect.integrations.megatron.rules_offload import OFFLOAD_RULES
from recollect.integrations.megatron.rules_others import OTHER_RULES, mtp_block_clash
from recollect.integrations.megatron.rules_recompute import RECOMPUTE_RULES, num_layers_clash
from recollect.integrations.megatron.training_setting import TrainingSetting
from recollect.warning import warn_user

__all__ = ["RULES", "check_config", "check_setting", "report_mtp_block", "report_num_layers"]

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
    alone=_types,
)
_RULES = {"types": _TYPE_RULE, **RECOMPUTE_RULES, **OFFLOAD_RULES, **CUDA_GRAPH_RULES, **OTHER_RULES}
RULES: tuple[Rule, ...] = tuple(replace(rule, name=name) for name, rule in _RULES.items())
"""In the order in which they are checked: rules about single values first."""


def check_config(config: RecomputeSettings) -> None:
    """Check the rules that need only the configuration."""
    for rule in RULES:
        if not rule.needs_training and (clash := rule.clash(config)) is not None:
            _report(rule, clash)


def check_setting(config: RecomputeSettings, setting: TrainingSetting) -> None:
    """Check the rules that compare with other settings."""
    for rule in RULES:
        if rule.needs_training and (clash := rule.clash(config, setting)) is not None:
            _report(rule, clash)


def report_num_layers(config: RecomputeSettings, sizes: list[int]) -> None:
    """Check that a model with chunks of these sizes has as many layers as should be recomputed."""
    if (clash := num_layers_clash(config, sizes)) is not None:
        _report(_rule("num-layers-range"), clash)


def report_mtp_block(config: RecomputeSettings, num_heads: int) -> None:
    """Warn that a model's multi-token prediction layers are not recomputed."""
    _report(_rule("mtp-block"), mtp_block_clash(config, num_heads))


def _rule(name: str) -> Rule:
    return next(rule for rule in RULES if rule.name == name)


def _report(rule: Rule, clash: Clash) -> None:
    """Raise or warn, according to the rule."""
    error = ConfigError(rule=rule.name, settings=clash.settings, reason=clash.reason, advice=clash.advice)
    if rule.ours == "error":
        raise error
    warn_user(str(error), ConfigWarning)
