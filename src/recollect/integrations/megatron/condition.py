"""What breaks a rule in the value of one setting."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

__all__ = ["OFF", "ON", "ONE_RANK", "SET", "SEVERAL_RANKS", "UNSET", "Broken", "Condition"]
__all__ += ["before", "below", "has", "one_of", "other_than", "version_of"]

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


ON: Final = Condition(bool, "`{}`")
OFF: Final = Condition(lambda value: not value, "without `{}`")
SET: Final = Condition(lambda value: value is not None, "`{}`")
ONE_RANK: Final = Condition(lambda ranks: ranks <= 1, "`{}` 1")
SEVERAL_RANKS: Final = Condition(lambda ranks: ranks != 1, "`{}` above 1")
UNSET: Final = Condition(lambda value: value is None, "without `{}`")


def one_of(*values: object) -> Condition:
    """Hold for some values, whose words stand for the setting."""
    return Condition(lambda value: value in values, _either(values))


def other_than(*values: object) -> Condition:
    """Hold for all values but some; the rule's texts name the value."""
    return Condition(lambda value: [] if value in values else [value], f"without {_either(values)}")


def below(least: int) -> Condition:
    """Hold for what is set and is no whole number, or a smaller one."""
    return Condition(
        lambda value: value is not None and (type(value) is not int or value < least), f"`{{}}` below {least}"
    )


def before(*version: int) -> Condition:
    """Hold for earlier versions."""
    return Condition(lambda text: version_of(text) < version, f"`{{}}` before {'.'.join(map(str, version))}")


def has(*names: str) -> Condition:
    """Hold for lists with some of the names; the rule's texts name those in one phrase."""

    def those_in(value: Iterable[str]) -> list[str]:
        there = [name for name in names if name in value]
        return [" and ".join(there)] if there else []

    return Condition(those_in, _either(names))


def _either(values: Iterable[object]) -> str:
    return " or ".join(f"`{value}`" for value in values)


def version_of(text: str | None) -> tuple[int, int]:
    """Return the major and minor version; (0, 0) if not installed."""
    parts = [int(digits) for part in (text or "").split(".")[:2] if (digits := "".join(filter(str.isdigit, part)))]
    return (parts[0], parts[1]) if len(parts) == 2 else (0, 0)
