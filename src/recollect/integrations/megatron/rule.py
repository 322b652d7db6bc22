"""A rule about settings: what may not stand together, Megatron's answer to it, ours, and why.

The rules stand in the files `rules_*.py` by topic; `docs/megatron.md` has the table made from them.
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
"""What recollect does: refuses; warns; has no such limit; does what Megatron does without a word; refuses for want of the part
that it concerns."""


@dataclass(frozen=True, slots=True)
class Clash:
    """What a rule found: the settings with their values, why they cannot stand so, and what to change."""

    settings: Mapping[str, object]
    reason: str
    advice: str


Alone: TypeAlias = Callable[[RecomputeSettings], Clash | None]
Within: TypeAlias = Callable[[RecomputeSettings, TrainingSetting], Clash | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule.

    Attributes:
        name: how errors and the table call it.
        when: the settings concerned, in words.
        megatron: Megatron's answer, in words.
        ours: what kind of answer recollect gives.
        why: the reason for ours.
        alone: finds a clash in the configuration by itself.
        within: finds a clash with the rest of the settings.
    """

    name: str
    when: str
    megatron: str
    ours: Answer
    why: str
    alone: Alone | None = None
    within: Within | None = None


def found(source: object, *names: str) -> dict[str, object]:
    """Return settings with their values, for an error."""
    return {name: getattr(source, name) for name in names}


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return "Did you mean ...? " if a known name looks like this one, else ""."""
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f"Did you mean {close[0]!r}? " if close else ""
