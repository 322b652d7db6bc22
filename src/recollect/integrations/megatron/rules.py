"""All rules, from rules.yaml, and the checks that apply them: of a configuration alone, and of one within a training."""

from __future__ import annotations

from importlib import resources
from typing import Any, Final

import yaml

from recollect.errors import ConfigError, ConfigWarning, NotYetError
from recollect.integrations.megatron.checks import ALONE, WITHIN
from recollect.integrations.megatron.choice import MODULES, OFFLOAD_MODULES
from recollect.integrations.megatron.recompute_settings import RecomputeSettings
from recollect.integrations.megatron.rule import Clash, Rule, condition
from recollect.integrations.megatron.training_setting import TrainingSetting
from recollect.warning import warn_user

_NAMES: Final = {"recompute_modules": MODULES, "offload_modules": OFFLOAD_MODULES}


def _rule(name: str, entry: dict[str, Any]) -> Rule:
    listed = entry.pop("known", ())
    known = tuple(_NAMES[listed] if isinstance(listed, str) else listed)
    breaks = {setting: condition(given, known) for setting, given in entry.pop("breaks", {}).items()}
    settings = tuple(entry.pop("settings", breaks))
    alone, within = ALONE.get(name), WITHIN.get(name)
    return Rule(name=name, breaks=breaks, alone=alone, within=within, settings=settings, known=known, **entry)


_TEXT: Final = (resources.files(__package__) / "rules.yaml").read_text(encoding="utf-8")
# In C if PyYAML has that, which takes 3 ms; else 26.
_TABLE: Final = yaml.load(_TEXT, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
RULES: tuple[Rule, ...] = tuple(_rule(name, entry) for name, entry in _TABLE["rules"].items())
"""In the order in which they are checked: rules about single values first."""
NOT_YET: tuple[Rule, ...] = tuple(_rule("", entry) for entry in _TABLE["not yet"])
"""What asks for a feature that recollect lacks."""


def check(config: RecomputeSettings, setting: TrainingSetting | None = None) -> None:
    """Check the rules that compare the configuration with a setting; without one, those that need only the configuration."""
    for rule in RULES:
        if rule.ours != "free" and rule.needs_training == (setting is not None):
            report(rule.name, rule.clash(config, setting))


def check_rule(name: str, config: RecomputeSettings, setting: TrainingSetting) -> None:
    """Check one rule."""
    report(name, next(rule for rule in RULES if rule.name == name).clash(config, setting))


def report(name: str, clash: Clash | None) -> None:
    """Raise or warn, according to a rule, if there is a clash."""
    if clash is None:
        return
    error = ConfigError(rule=name, settings=clash.settings, reason=clash.reason, advice=clash.advice)
    if next(rule.ours for rule in RULES if rule.name == name) == "error":
        raise error
    warn_user(str(error), ConfigWarning)


def refuse_not_yet(config: RecomputeSettings, setting: TrainingSetting | None) -> None:
    """Raise NotYetError if a setting asks for a missing feature."""
    for missing in NOT_YET:
        if (clash := missing.clash(config, setting)) is not None:
            raise NotYetError(settings=clash.settings, needs=clash.reason, advice=clash.advice)
