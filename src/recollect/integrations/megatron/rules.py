"""All rules, and the two checks that apply them: of a configuration alone, and of one within a training."""

from __future__ import annotations

from recollect.errors import ConfigError, ConfigWarning
from recollect.integrations.megatron.recompute_settings import RecomputeSettings
from recollect.integrations.megatron.rule import Clash, Rule
from recollect.integrations.megatron.rules_cuda_graph import CUDA_GRAPH_RULES
from recollect.integrations.megatron.rules_modules import MODULE_RULES
from recollect.integrations.megatron.rules_offload import OFFLOAD_RULES
from recollect.integrations.megatron.rules_others import OTHER_RULES, mtp_block_clash
from recollect.integrations.megatron.rules_recompute import RECOMPUTE_RULES, num_layers_clash
from recollect.integrations.megatron.rules_stash import STASH_RULES
from recollect.integrations.megatron.rules_types import TYPE_RULES
from recollect.integrations.megatron.training_setting import TrainingSetting
from recollect.warning import warn_user

__all__ = ["RULES", "check_config", "check_setting", "report_mtp_block", "report_num_layers"]

RULES: tuple[Rule, ...] = (
    *TYPE_RULES,
    *RECOMPUTE_RULES,
    *MODULE_RULES,
    *OFFLOAD_RULES,
    *STASH_RULES,
    *CUDA_GRAPH_RULES,
    *OTHER_RULES,
)
"""In the order in which they are checked: rules about single values first."""


def check_config(config: RecomputeSettings) -> None:
    """Check the rules that need only the configuration."""
    for rule in RULES:
        if rule.alone is not None and (clash := rule.clash(config)) is not None:
            _report(rule, clash)


def check_setting(config: RecomputeSettings, setting: TrainingSetting) -> None:
    """Check the rules that compare with other settings."""
    for rule in RULES:
        if rule.within is not None and (clash := rule.clash(config, setting)) is not None:
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
