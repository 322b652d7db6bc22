"""What breaks a rule in the value of one setting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

Broken: TypeAlias = object
"""Whether a rule is broken: true or false; or a list, empty if not, of what the rule's reason and advice name as `{}`; or
the clash itself, or None, where its settings or words depend on more than that."""


@dataclass(frozen=True, slots=True)
class Condition:
    """What breaks a rule in the value of one setting.

    Attributes:
        holds: tells of a value whether it does: true or false, or a list as in `Broken`.
        words: the same in words, with `{}` for the setting's name.
    """

    holds: Callable[[Any], Broken]
    words: str


_WORDS: Final = {
    True: Condition(bool, "`{}`"),
    False: Condition(lambda value: not value, "without `{}`"),
    "set": Condition(lambda value: value is not None, "`{}`"),
    "unset": Condition(lambda value: value is None, "without `{}`"),
}
_COMPARED: Final[Mapping[str, Callable[[Any, str], bool]]] = {
    "above": lambda value, least: value > int(least),
    "at most": lambda value, most: value <= int(most),
    # Of what is set, also what is no whole number.
    "below": lambda value, least: value is not None and (type(value) is not int or value < int(least)),
    "before": lambda value, version: version_of(value) < version_of(version),
}


def condition(given: Any, known: Iterable[object] = ()) -> Condition:
    """Return the condition that a table gives in short.

    Args:
        given: `true`, `false`, `set` or `unset`; a comparison, such as `above 1`, `at most 1`, `below 1` (which any other type
            is) or `before 2.6`; a list, for these values, or for a list with some of these names; `{not: a list}`, for any
            value or name but these.
        known: stands for the list in `{not: known}`.
    """
    if isinstance(given, list):
        return Condition(lambda value: _those(given, value), _either(given))
    if isinstance(given, dict):
        right = (None, *known) if given["not"] == "known" else tuple(given["not"])
        return Condition(lambda value: _others(right, value), f"without {_either(right)}")
    if given in _WORDS:
        return _WORDS[given]
    word, _, limit = given.rpartition(" ")
    return Condition(
        lambda value: _COMPARED[word](value, limit), f"`{{}}` {'' if word == 'at most' else word + ' '}{limit}"
    )


def _those(names: list[object], value: object) -> Broken:
    """Return whether a value is one of these; of a list, those that are there, in one phrase."""
    if not isinstance(value, list | tuple):
        return value in names
    there = [str(name) for name in names if name in value]
    return [" and ".join(there)] if there else []


def _others(right: tuple[object, ...], value: object) -> list[object]:
    return [name for name in (value if isinstance(value, list | tuple) else [value]) if name not in right]


def _either(values: Iterable[object]) -> str:
    return " or ".join(f"`{value}`" for value in values)


def version_of(text: str | None) -> tuple[int, int]:
    """Return the major and minor version; (0, 0) if not installed."""
    parts = [int(digits) for part in (text or "").split(".")[:2] if (digits := "".join(filter(str.isdigit, part)))]
    return (parts[0], parts[1]) if len(parts) == 2 else (0, 0)
