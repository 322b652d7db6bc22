"""The two tiers of tests: `scripts/test` leaves out those that are marked long, `scripts/test --all` runs them, too."""

from collections.abc import Iterable
from typing import Any

import pytest


def long(values: Iterable[Any]) -> list[Any]:
    return long_but((), values)


def long_but(quick: Iterable[Any], values: Iterable[Any], *, are_rows: bool = False) -> list[Any]:
    """`are_rows`: each of the values has one for each of several arguments."""
    named = [*quick]
    return [
        value if value in named else pytest.param(*(value if are_rows else (value,)), marks=pytest.mark.long)
        for value in values
    ]
