"""Keeps the garbage collector from running while there is nothing for it to find, or time is taken."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage in a with-block or function, in any thread.

    A planner makes many small objects that refer to each other and that reference counts soon free. Collections would find
    next to nothing, and take half of the time: they are frequent, and each visits all objects of a large step. An op that is
    timed would take as long as a collection that it happens to begin.

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
