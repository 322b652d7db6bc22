"""Keeps the garbage collector from running while there is nothing to find, or while something is timed."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage in a with-block or function, in any thread.

    A planner makes many small objects that refer to each other and are soon freed by reference counts. Collections would find
    next to nothing, and take half of the time: they are frequent, and each visits all objects of a large step. A timed op would
    include any collection that it happens to start.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
