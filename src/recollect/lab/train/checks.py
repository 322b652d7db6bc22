"""Ranges of flags, for the dataclasses that hold them."""

from __future__ import annotations

__all__ = ["at_least", "within"]


def at_least(flags: object, least: int, *names: str) -> None:
    """Refuse flags below `least`.

    Raises:
        ValueError: names the first one and what it is.
    """
    for name in names:
        if getattr(flags, name) < least:
            raise ValueError(f"{name}: got {getattr(flags, name)}, expected at least {least}.")


def within(flags: object, name: str, low: float, high: float) -> None:
    """Refuse a flag below `low` or above `high`.

    Raises:
        ValueError: names it and what it is.
    """
    if not low <= getattr(flags, name) <= high:
        raise ValueError(f"{name}: got {getattr(flags, name)}, expected {low:g} to {high:g}.")
