"""A rule about settings: which ones clash, how Megatron answers, how recollect answers, and why.

The rules are in the files `rules_*.py`, by topic; `docs/megatron.md` has the table generated from them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from recollect.integrations.megatron.recompute_settings import RecomputeSettings
from recollect.integrations.megatron.training_setting import TrainingSetting

__all__ = ["Answer", "Clash", "Rule", "did_you_mean", "found"]

Answer = Literal["error", "warning", "free", "same", "not yet"]
"""How recollect answers: raises; warns; has no such limit; does silently what Megatron does; lacks the feature."""


@dataclass(frozen=True, slots=True)
class Clash:
    """A broken rule: the settings with their values, why they are invalid, and what to change."""

    settings: Mapping[str, object]
    reason: str
    advice: str


Broken: TypeAlias = object
"""Whether a rule is broken: true or false; or a list, empty if not, of what the rule's reason and advice name as `{}`; or
the clash itself, or None, where its settings or words depend on more than that."""
Alone: TypeAlias = Callable[[RecomputeSettings], Broken]
Within: TypeAlias = Callable[[RecomputeSettings, TrainingSetting], Broken]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule.

    Attributes:
        name: as in errors and in the table.
        when: the settings that break it, in words.
        megatron: Megatron's answer, in words.
        ours: recollect's answer.
        why: the reason for it.
        alone: tells whether the configuration breaks it.
        within: tells whether the configuration breaks it, with the rest of the training's settings.
        settings: what an error shows, in this order; "modules" are the recomputed ones, with defaults.
        reason: what an error gives as its reason.
        advice: what an error says to do.
        known: the right names, if the wrong one that breaks the rule may be a misspelling.
    """

    name: str
    when: str
    megatron: str
    ours: Answer = "error"
    why: str
    alone: Alone | None = None
    within: Within | None = None
    settings: tuple[str, ...] = ()
    reason: str = ""
    advice: str = ""
    known: tuple[str, ...] = ()

    def clash(self, config: RecomputeSettings, setting: TrainingSetting | None = None) -> Clash | None:
        """Return how settings break the rule, or None; one of `within` is not broken where the setting is None."""
        broken: Broken = None
        if self.alone is not None:
            broken = self.alone(config)
        elif self.within is not None and setting is not None:
            broken = self.within(config, setting)
        if isinstance(broken, Clash):
            return broken
        if not broken:
            return None
        details = broken if isinstance(broken, list) else []
        hint = did_you_mean(details[0], self.known) if self.known else ""
        return Clash(
            _shown(config, setting, self.settings), self.reason.format(*details), hint + self.advice.format(*details)
        )


def found(source: object, *names: str) -> dict[str, object]:
    """Return settings with their values, for errors."""
    return {name: getattr(source, name) for name in names}


def _shown(config: RecomputeSettings, setting: TrainingSetting | None, names: tuple[str, ...]) -> dict[str, object]:
    return {
        "recompute_modules" if name == "modules" else name: getattr(config if hasattr(config, name) else setting, name)
        for name in names
    }


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return "Did you mean ...? " if a known name is similar, else ""."""
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f"Did you mean {close[0]!r}? " if close else ""
