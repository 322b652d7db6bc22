"""Says what recollect is doing, so that whoever waits for it knows.

Work that may take long runs in a `stage`; stages may be nested, and the innermost is shown. The line appears on standard error
once the outermost has taken two seconds, and disappears with it. It is for people: nothing is written where standard error
is no terminal, by any process of several but the first, or where the environment says `RECOLLECT_PROGRESS=0`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from recollect.progress.line import Line

_DELAY_S: Final = 2.0
_SWITCH: Final = "RECOLLECT_PROGRESS"


# That of the outermost stage that is under way, if it has one.
_lines: list[Line] = []


@contextmanager
def stage(text: str, total: int | None = None) -> Iterator[Callable[[], None]]:
    """Say what the block does.

    Args:
        text: what it does, such as "planning".
        total: how many parts it has, if that is known and more than one.

    Yields:
        A function to call after each part.

    Example:
        >>> with stage("planning", total=3) as done:
        ...     for _ in range(3):
        ...         done()
    """
    if threading.current_thread() is not threading.main_thread():
        yield _nothing
        return
    outermost = not _lines
    line = _new_line() if outermost else _lines[0]
    if line is None:
        yield _nothing
        return
    if outermost:
        _lines.append(line)
    line.begin(text, total)
    try:
        yield line.advance
    finally:
        line.end()
        if outermost:
            _lines.clear()
            line.close()


def _new_line() -> Line | None:
    """Return a line that appears later; None where nobody would read it."""
    if os.environ.get(_SWITCH) == "0" or os.environ.get("RANK", "0") != "0":
        return None
    try:
        is_terminal = sys.stderr.isatty()
    except (AttributeError, ValueError):
        return None  # Standard error is closed, or there is none.
    if not is_terminal:
        return None
    from recollect.progress.line import Line  # rich takes 0.1 s to import.

    return Line(sys.stderr, _DELAY_S)


def _nothing() -> None:
    pass
