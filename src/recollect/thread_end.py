"""Do something when a thread ends, before PyTorch releases its state."""

import threading
import weakref
from collections.abc import Callable


class _Here(threading.local):
    """State that lives as long as the thread that uses it."""

    def __init__(self) -> None:
        self.anchor: set[None] = set()


_here = _Here()


def at_end_of_thread(action: Callable[[], object]) -> "weakref.finalize[[], set[None]]":
    """Make this thread do something when it ends; the main thread ends with the process.

    Other threads still running when the process ends do nothing more, nor do those that a forked process does not have.
    The handle's `detach` forgets it.
    """
    here = threading.get_ident()
    return weakref.finalize(_here.anchor, lambda: action() if threading.get_ident() == here else None)
