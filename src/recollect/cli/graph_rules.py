"""Check Megatron's settings of CUDA graphs on a command line: by its rules first, then by what recollect lacks."""

import shlex
from collections.abc import Sequence

from recollect.doctor.settings import SettingsInText
from recollect.errors import ConfigError, NotYetError
from recollect.integrations.megatron.arguments import describes_model, long_flags
from recollect.integrations.megatron.rule import Clash
from recollect.integrations.megatron.rules import NOT_YET, RULES
from recollect.integrations.megatron.settings import RecomputeSettings, TrainingSetting, taken_settings

_SWITCH = "cuda_graph_impl"


def check_graphs(words: Sequence[str], *, trains: bool = False) -> None:
    """Raise an error if a command line has something captured that cannot be.

    `trains`: the command runs the steps, and can capture whole ones.
    """
    seen = SettingsInText()
    seen.look(shlex.join(long_flags(words)), 1)
    values = {name: value for scope in seen.settings("") for name, value in scope.values.items()}
    if not describes_model(words):  # Models by name have none, and Megatron's have some by default.
        values = {"hidden_dropout": 0.0, "attention_dropout": 0.0, **values}
    config = RecomputeSettings(**taken_settings(RecomputeSettings, values))
    setting = TrainingSetting(**taken_settings(TrainingSetting, values))
    captures = trains and values.get(_SWITCH) == "full_iteration"
    for rule in RULES if captures else (*RULES, *NOT_YET):
        is_of_graphs = _SWITCH in {name for case in (rule, *rule.cases) for name in case.settings}
        if is_of_graphs and (clash := rule.clash(config, setting)) is not None:
            given = _in_flags(clash)
            if not rule.name:
                raise NotYetError(settings=given.settings, needs=given.reason, advice=given.advice)
            raise ConfigError(rule=rule.name, settings=given.settings, reason=given.reason, advice=given.advice)


def _in_flags(clash: Clash) -> Clash:
    """Name flags in place of the settings that they set; leave out empty lists."""
    flags = {name: f"--{name.replace('_', '-')}" for name in clash.settings}
    reason, advice = clash.reason, clash.advice
    for name, flag in flags.items():
        reason, advice = reason.replace(name, flag), advice.replace(name, flag)
    return Clash(
        {flag: clash.settings[name] for name, flag in flags.items() if clash.settings[name] != ()}, reason, advice
    )
