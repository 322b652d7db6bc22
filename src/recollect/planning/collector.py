"""Keeps Python's garbage collector from looking, again and again, at what a plan is made of."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["without_collections"]


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage in a with-block or function, in any thread.

    A planner makes many small objects that refer to each other and soon go by their reference counts. Collections would find
    next to nothing, and take half of the time: there are as many as objects are made, each looks at all of a large step.

    Example:
        >>> with without_collections():
        ...     gc.isenabled()
        False
        >>> gc.isenabled()
        True
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
