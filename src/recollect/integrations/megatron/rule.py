"""A rule about settings: which ones clash, how Megatron answers, how recollect answers, and why.

The rules are in rules.yaml; `docs/megatron.md` has the table generated from them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Final, Literal, TypeAlias

from recollect.fields import parse_yaml
from recollect.integrations.megatron.settings import RecomputeSettings, TrainingSetting

Answer = Literal["error", "warning", "free", "same", "not yet"]
"""How recollect answers: raises; warns; has no such limit; silently does the same as Megatron; lacks the feature."""

Broken: TypeAlias = object
"""Whether a rule is broken: true or false; or a list, empty if not, of names for `{}` in the rule's reason and advice; or
the clash itself, or None, where its settings or words depend on more than that."""


_COMPARED: Final[Mapping[str, Callable[[Any, str], bool]]] = {
    "above": lambda value, least: value > int(least),
    "at most": lambda value, most: value <= int(most),
    # Of values that are set, including those that are no whole numbers.
    "below": lambda value, least: value is not None and (type(value) is not int or value < int(least)),
    "before": lambda value, version: version_of(value) < version_of(version),
}


def holds(given: Any, value: Any, known: Iterable[object] = ()) -> Broken:
    """Return whether a condition of a table holds of a value, as in `Broken`.

    A condition is `true`, `false`, `set` or `unset`; a comparison, such as `above 1`, `at most 1`, `below 1` (which any other
    type is) or `before 2.6`; a list, for these values, or for a list with some of these names, in one phrase; or `{not: a
    list}`, for any value or name but these, where `known` stands for the list.
    """
    if isinstance(given, bool):
        return bool(value) is given
    if isinstance(given, list) and isinstance(value, list | tuple):
        there = [str(name) for name in given if name in value]
        return [" and ".join(there)] if there else []
    if isinstance(given, list):
        return value in given
    if isinstance(given, dict):
        right = (None, *known) if given["not"] == "known" else given["not"]
        return [name for name in (value if isinstance(value, list | tuple) else [value]) if name not in right]
    if given in ("set", "unset"):
        return (value is not None) is (given == "set")
    word, _, limit = given.rpartition(" ")
    return _COMPARED[word](value, limit)


def version_of(text: str | None) -> tuple[int, int]:
    """Return the major and minor version; (0, 0) if not installed."""
    parts = [int(digits) for part in (text or "").split(".")[:2] if (digits := "".join(filter(str.isdigit, part)))]
    return (parts[0], parts[1]) if len(parts) == 2 else (0, 0)


@dataclass(frozen=True, slots=True)
class Clash:
    """A broken rule: the settings with their values, why they are invalid, and what to change."""

    settings: Mapping[str, object]
    reason: str
    advice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule. `breaks`, `cases` or `check` says what breaks it; none of them if nothing here does."""

    name: str = ""
    """As in errors and in the table; empty for a missing feature."""
    when: str = ""
    """The settings that break it, in words, where `breaks` does not say."""
    megatron: str = "ValueError"
    ours: Answer = "error"
    """recollect's answer; "free" breaks Megatron's rule, as `recollect doctor` says, but none of ours."""
    why: str = ""
    """The reason for it, where the error gives a different one or none."""
    breaks: Mapping[str, Any] = field(default_factory=dict)
    """The conditions that all hold of a configuration, and of the rest of the training's settings, that break it, by names of
    fields or properties: "modules" are the recomputed ones, with defaults."""
    cases: tuple[Rule, ...] = ()
    """Several ways to break it, each a rule with settings, reason and advice; the first match counts."""
    check: Callable[..., Broken] | None = None
    """Tells whether the configuration breaks it, with the rest of the training's settings if it `needs_training`."""
    needs_training: bool = False
    settings: tuple[str, ...] = ()
    """The settings that an error shows, in this order."""
    reason: str = ""
    """The reason that an error gives; for a missing feature, what recollect would need."""
    advice: str = ""
    """The advice that an error gives. It may name the wrong value as `{}`, and the right names as `{known}`."""
    known: tuple[str, ...] = ()
    """The right names, if the wrong one that breaks the rule may be a misspelling."""

    @property
    def is_checked(self) -> bool:
        return bool(self.breaks or self.cases or self.check)

    def clash(self, config: RecomputeSettings, setting: TrainingSetting | None = None) -> Clash | None:
        """Return how settings break the rule, or None; one that needs the setting is not broken where that is None."""
        if self.cases:
            return next(filter(None, (case.clash(config, setting) for case in self.cases)), None)
        broken = self._broken(config, setting)
        if isinstance(broken, Clash):
            return broken
        if not broken:
            return None
        details = broken if isinstance(broken, list) else []
        hint = did_you_mean(details[0], self.known) if details and self.known else ""
        shown = {
            "recompute_modules" if name == "modules" else name: _value(config, setting, name) for name in self.settings
        }
        return Clash(
            shown, self.reason.format(*details), hint + self.advice.format(*details, known=", ".join(self.known))
        )

    def _broken(self, config: RecomputeSettings, setting: TrainingSetting | None) -> Broken:
        if self.needs_training and setting is None:
            return None
        if self.check is not None:
            return self.check(config, setting) if self.needs_training else self.check(config)
        details: list[Broken] = []
        for name, given in self.breaks.items():
            broken = holds(given, _value(config, setting, name), self.known)
            if not broken:
                return None
            details += broken if isinstance(broken, list) else []
        return details or bool(self.breaks)


def _value(config: RecomputeSettings, setting: TrainingSetting | None, name: str) -> Any:
    return getattr(setting if hasattr(TrainingSetting, name) else config, name)


def read_table(package: str, name: str) -> Any:
    return parse_yaml((resources.files(package) / name).read_text(encoding="utf-8"))


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return "Did you mean ...? " if a known name is in this one, or similar, whatever the case; else ""."""
    given, found = str(name).lower(), {one.lower(): one for one in known}
    inside = sorted((one for one in found if one in given), key=len)[-1:]
    close = inside or difflib.get_close_matches(given, found, n=1)
    return f"Did you mean {found[close[0]]!r}? " if close else ""
