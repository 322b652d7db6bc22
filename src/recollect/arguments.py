"""Check the type of an argument; the most common mistake is to swap two of them."""

import os
from collections.abc import Iterable
from typing import Final

from recollect.errors import ArgumentError

_MOST_SHOWN: Final = 200


def check_kind(call: str, name: str, value: object, kind: type, expected: str) -> None:
    if isinstance(value, kind):
        return
    advice = f"Call it as recollect.{call}."
    if isinstance(value, type):
        got = f"the class {value.__name__}"
        if issubclass(value, kind):
            advice = f"Make one: {value.__name__}(...)."
    elif isinstance(value, (str, os.PathLike)):
        got = f"the text {_shown(value)}" if isinstance(value, str) else f"the path {os.fspath(value)!r}"
        if hasattr(kind, "load") and os.fspath(value).endswith(".json"):
            advice = f"Load it first: {expected}.load({os.fspath(value)!r})."
    else:
        got = f"an object of class {type(value).__name__}"
    raise ArgumentError(f"recollect.{call}: got {got} as {name}, expected one of class {expected}. {advice}")


def listed(paths: Iterable[str] | None) -> list[str] | None:
    """Return module paths as a list; refuse a string, whose letters would each be taken for a path."""
    if isinstance(paths, str):
        raise ArgumentError(f"units: got the text {paths!r}, expected a list of paths. Write units=[{paths!r}].")
    return None if paths is None else list(paths)


def _shown(text: str) -> str:
    """Show a string, or its beginning: it may be a whole profile."""
    return repr(text) if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]!r}..."
