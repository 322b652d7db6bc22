"""Read DeepSpeed's configuration: recollect's own section in it, and `activation_checkpointing`, which turns into a plan.

{"train_batch_size": 32, "zero_optimization": {"stage": 2}, "recollect": {"memory_budget": "22GiB"}}

In DeepSpeed the latter does not choose what to recompute: it configures `deepspeed.checkpointing.checkpoint`, which a model
calls on the parts to recompute, usually each layer. So the section means: each layer, or every few layers
(`activation_checkpoint_interval` of its pipelines). Hugging Face's models do not call that function, so in DeepSpeed the
section does not affect them. docs/megatron.md has each setting's effect here.

Read in DeepSpeed master at edaa7221 (`runtime/activation_checkpointing`).
"""

from __future__ import annotations

import base64
import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recollect.arguments import listed
from recollect.errors import ConfigError, ConfigWarning, NotYetError
from recollect.extras import needed
from recollect.integrations.megatron.compile import megatron_plan
from recollect.integrations.megatron.rule import did_you_mean
from recollect.integrations.megatron.rules import RecomputeConfig
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile
from recollect.warning import warn_user

if TYPE_CHECKING:
    from recollect.attaching.held import OnLarger

_SECTION = "recollect"
_NEEDS = {
    "partition_activations": "kept values that are split among the ranks of tensor parallelism",
    "cpu_checkpointing": "values that are copied to host memory and back",
}


def read_config(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration among the arguments of `deepspeed.initialize`, as DeepSpeed reads it; {} where it raises."""
    config = given.get("config") or given.get("config_params") or getattr(given.get("args"), "deepspeed_config", None)
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, str):
        return {}
    # JSON with comments, by DeepSpeed's own parser.
    with needed("deepspeed", by=f"a configuration in a file, {config},"):
        hjson = importlib.import_module("hjson")
    try:
        path = Path(config)
        text = path.read_text(encoding="utf-8") if path.is_file() else base64.urlsafe_b64decode(config).decode()
        found = hjson.loads(text)
    except (ValueError, OSError):
        return {}
    return found if isinstance(found, Mapping) else {}


@dataclass(frozen=True, kw_only=True)
class BudgetSection:
    """The section "recollect" of a configuration; an unknown setting or an invalid value raises ConfigError."""

    memory_budget: int | str | None = None
    """As of `initialize`, and so are the next two; None is the default."""
    on_larger: OnLarger = "replan"
    units: list[str] | None = None
    measure: bool = False
    """Whether to measure peaks on the CPU, too; see `recollect.attach`."""

    def __post_init__(self) -> None:
        if self.on_larger not in ("replan", "warn", "raise"):
            raise ConfigError(
                settings={"on_larger": self.on_larger},
                reason="no such value",
                advice="Choose from replan, warn, raise.",
            )

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> BudgetSection:
        section = config.get(_SECTION, {})
        if not isinstance(section, Mapping):
            raise ConfigError(
                settings={_SECTION: section},
                reason="no section",
                advice=f'Write {{"{_SECTION}": {{"memory_budget": "22GiB"}}}}.',
            )
        _check_names(cls, section, f"{_SECTION}.")
        return cls(**section)

    def with_arguments(
        self, memory_budget: int | str | None, on_larger: OnLarger | None, units: Iterable[str] | None
    ) -> BudgetSection:
        given = {"memory_budget": memory_budget, "on_larger": on_larger, "units": listed(units)}
        defaults = BudgetSection()
        merged: dict[str, Any] = {}
        for name, argument in given.items():
            own = getattr(self, name)
            is_said = own != getattr(defaults, name)
            if argument is not None and is_said and argument != own:
                raise ConfigError(
                    settings={f"{_SECTION}.{name}": own, name: argument},
                    reason="the configuration and the argument differ",
                    advice="Drop one of them.",
                )
            merged[name] = own if argument is None else argument
        return replace(self, **merged)

    @property
    def budget(self) -> int | str:
        from recollect.fitting import DEFAULT_BUDGET  # imports torch

        return DEFAULT_BUDGET if self.memory_budget is None else self.memory_budget


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointing:
    """The section, with DeepSpeed's names and defaults; docs/megatron.md describes each setting's effect here.

    Raises:
        ConfigError: a value of the wrong type, settings that clash, or one that DeepSpeed does not have.

    Warns:
        ConfigWarning: a setting that has no effect.

    Example:
        >>> ActivationCheckpointing.of({"activation_checkpointing": {"number_checkpoints": None}}).partition_activations
        False
    """

    partition_activations: bool = False
    cpu_checkpointing: bool = False
    contiguous_memory_optimization: bool = False
    number_checkpoints: int | None = None
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_number = field.name == "number_checkpoints"
            if not (value is None or (type(value) is int and value >= 1)) if is_number else type(value) is not bool:
                expected = "a whole number, 1 or more, or None" if is_number else "True or False"
                raise ConfigError(settings={field.name: value}, reason="no such value", advice=f"Set it to {expected}.")
        if self.contiguous_memory_optimization and not self.partition_activations:
            self._refuse_contiguous("partition_activations", "only partitioned values are put together")
        if self.contiguous_memory_optimization and self.number_checkpoints is None:
            self._refuse_contiguous("number_checkpoints", "its buffers are sized by that number")
        if self.number_checkpoints is not None and not self.contiguous_memory_optimization:
            _warn("number_checkpoints", "it sizes the buffers of contiguous_memory_optimization, which is off")
        if self.synchronize_checkpoint_boundary:
            _warn("synchronize_checkpoint_boundary", "values are recomputed one by one, so no region has an edge")
        if self.profile:
            _warn("profile", "recollect.layer_usage has the times of what runs again")

    def _refuse_contiguous(self, other: str, reason: str) -> None:
        settings = {name: getattr(self, name) for name in ("contiguous_memory_optimization", other)}
        advice = f"Set {other}, or leave out contiguous_memory_optimization."
        raise ConfigError(settings=settings, reason=reason, advice=advice)

    def refuse_not_yet(self, advice: str) -> None:
        """Raise for values split among ranks, or in host memory; the error gives the advice."""
        for name, needs in _NEEDS.items():
            if getattr(self, name):
                raise NotYetError(settings={name: True}, needs=needs, advice=advice)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ActivationCheckpointing | None:
        """Read the section of a DeepSpeed configuration; None if it has none."""
        section = config.get("activation_checkpointing")
        if section is None:
            return None
        _check_names(cls, section)
        return cls(**section)


def _check_names(
    kind: type[BudgetSection | ActivationCheckpointing], section: Mapping[str, Any], prefix: str = ""
) -> None:
    known = [field.name for field in fields(kind)]
    for name in section:
        if name not in known:
            advice = f"{did_you_mean(name, known)}Choose from {', '.join(known)}."
            raise ConfigError(
                settings={f"{prefix}{name}": section[name]}, reason="there is no such setting", advice=advice
            )


def _warn(setting: str, reason: str) -> None:
    warn_user(f"{setting} has no effect: {reason}", ConfigWarning)


def deepspeed_plan(
    profile: Profile, section: ActivationCheckpointing | None, *, activation_checkpoint_interval: int = 1
) -> Plan:
    """Return the plan of a DeepSpeed section, without a budget; None recomputes nothing.

    `activation_checkpoint_interval`: layers per region, as in `PipelineModule`; 0 recomputes nothing.

    Raises:
        NotYetError: values split among ranks, or in host memory.
        ConfigError: an invalid interval, or one above the model's number of layers.

    Example:
        >>> from recollect.profile.events import StepLog
        >>> empty = Profile((), (), StepLog(), step_s=0.0)
        >>> deepspeed_plan(empty, None).note
        'DeepSpeed: no activation checkpointing'
    """
    if type(activation_checkpoint_interval) is not int or activation_checkpoint_interval < 0:
        raise ConfigError(
            settings={"activation_checkpoint_interval": activation_checkpoint_interval},
            reason="not a number of layers",
            advice="Set it to 1 or more, or to 0 to recompute nothing.",
        )
    if section is None or activation_checkpoint_interval == 0:
        plan = megatron_plan(profile, RecomputeConfig())
        return plan.with_note("DeepSpeed: no activation checkpointing")
    section.refuse_not_yet("Leave it out; each layer's input is then kept.")
    full = RecomputeConfig(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=activation_checkpoint_interval
    )
    note = f"DeepSpeed: activation checkpointing, {activation_checkpoint_interval} layers a region"
    return megatron_plan(profile, full).with_note(note)
