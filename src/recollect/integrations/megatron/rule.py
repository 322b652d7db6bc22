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


Alone: TypeAlias = Callable[[RecomputeSettings], Clash | None]
Within: TypeAlias = Callable[[RecomputeSettings, TrainingSetting], Clash | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule.

    Attributes:
        name: as in errors and in the table.
        when: the settings that break it, in words.
        megatron: Megatron's answer, in words.
        ours: recollect's answer.
        why: the reason for it.
        alone: finds a clash within the configuration.
        within: finds a clash with the rest of the training's settings.
    """

    name: str
    when: str
    megatron: str
    ours: Answer
    why: str
    alone: Alone | None = None
    within: Within | None = None


def found(source: object, *names: str) -> dict[str, object]:
    """Return settings with their values, for errors."""
    return {name: getattr(source, name) for name in names}


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return "Did you mean ...? " if a known name is similar, else ""."""
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f"Did you mean {close[0]!r}? " if close else ""
