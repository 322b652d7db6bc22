"""Check the numbers that describe a device."""

from __future__ import annotations

import math


def check_positive(what: str, number: float) -> None:
    """Raise ValueError for a number that is not finite, or 0 or less; `what` says which one."""
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{what}: got {number}, expected a finite number above 0")


def check_not_negative(what: str, number: float) -> None:
    """Raise ValueError for a number that is not finite, or less than 0; `what` says which one."""
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{what}: got {number}, expected a finite number, 0 or more")


def check_fraction(what: str, number: float) -> None:
    """Raise ValueError for a number that is not above 0 and at most 1; `what` says which one."""
    if not 0 < number <= 1:
        raise ValueError(f"{what}: got {number}, expected a fraction above 0, at most 1")
