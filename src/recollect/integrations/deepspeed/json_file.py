"""Read DeepSpeed's configuration, and the section of it that is recollect's own.

{"train_batch_size": 32, "zero_optimization": {"stage": 2}, "recollect": {"memory_budget": "22GiB"}}
"""

from __future__ import annotations

import base64
import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from recollect.attaching.attached import OnLarger
from recollect.errors import ConfigError
from recollect.extras import needed
from recollect.fitting import DEFAULT_BUDGET
from recollect.integrations.megatron.rule import did_you_mean

_SECTION = "recollect"


def read_config(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration among the arguments of `deepspeed.initialize`, read as DeepSpeed reads it.

    Args:
        given: the arguments by name.

    Returns:
        An empty one if there is none, or none that can be read: DeepSpeed says so.
    """
    config = given.get("config") or given.get("config_params") or getattr(given.get("args"), "deepspeed_config", None)
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, str):
        return {}
    # JSON with comments, by the parser that DeepSpeed brings.
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
    """The section "recollect" of a configuration.

    Attributes:
        memory_budget: as of `initialize`; None is the default.
        on_larger: what to do at a step that no plan was made for.
        units: module paths of the layers to plan; None where they are found.
    """

    memory_budget: int | str | None = None
    on_larger: OnLarger = "replan"
    units: list[str] | None = None

    def __post_init__(self) -> None:
        if self.on_larger not in ("replan", "warn", "raise"):
            raise ConfigError(
                settings={"on_larger": self.on_larger},
                reason="no such value",
                advice="Choose from replan, warn, raise.",
            )

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> BudgetSection:
        """Read the section; all defaults if there is none.

        Raises:
            ConfigError: a setting that there is not, or an invalid value.

        Example:
            >>> BudgetSection.of({"train_batch_size": 8, "recollect": {"memory_budget": "22GiB"}}).budget
            '22GiB'
        """
        section = config.get(_SECTION, {})
        known = [field.name for field in fields(cls)]
        if not isinstance(section, Mapping):
            raise ConfigError(
                settings={_SECTION: section},
                reason="no section",
                advice=f'Write {{"{_SECTION}": {{"memory_budget": "22GiB"}}}}.',
            )
        for name in section:
            if name not in known:
                advice = f"{did_you_mean(name, known)}Choose from {', '.join(known)}."
                raise ConfigError(
                    settings={f"{_SECTION}.{name}": section[name]}, reason="there is no such setting", advice=advice
                )
        return cls(**section)

    def with_arguments(
        self, memory_budget: int | str | None, on_larger: OnLarger | None, units: Iterable[str] | None
    ) -> BudgetSection:
        """Return the section with arguments of `initialize` in it.

        Raises:
            ConfigError: something is said in both places, and not the same.
        """
        given = {
            "memory_budget": memory_budget,
            "on_larger": on_larger,
            "units": None if units is None else list(units),
        }
        defaults = BudgetSection()
        merged: dict[str, Any] = {}
        for name, argument in given.items():
            own = getattr(self, name)
            is_said = own != getattr(defaults, name)
            if argument is not None and is_said and argument != own:
                raise ConfigError(
                    settings={f"{_SECTION}.{name}": own, name: argument},
                    reason="the configuration and the argument say different things",
                    advice="Drop one of them.",
                )
            merged[name] = own if argument is None else argument
        return BudgetSection(**merged)

    @property
    def budget(self) -> int | str:
        """The budget, or the default one."""
        return DEFAULT_BUDGET if self.memory_budget is None else self.memory_budget
