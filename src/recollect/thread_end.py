"""Have something done when a thread ends, whatever ends it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable


class _Here(threading.local):
    """What lives as long as the thread that looks at it."""

    def __init__(self) -> None:
        self.anchor: set[None] = set()


_here = _Here()


def at_end_of_thread(action: Callable[[], object]) -> weakref.finalize[[], set[None]]:
    """Have this thread do something when it ends; the main thread ends with the process.

    Returns:
        A handle, whose `detach` forgets it.

    Example:
        >>> import threading
        >>> from recollect.thread_end import at_end_of_thread
        >>> done = []
        >>> thread = threading.Thread(target=lambda: at_end_of_thread(lambda: done.append("ended")))
        >>> thread.start()
        >>> thread.join()
        >>> done
        ['ended']
    """
    handle = weakref.finalize(_here.anchor, action)
    # Others that still run when the process ends cannot do anything more, nor can the main thread in their place.
    handle.atexit = threading.current_thread() is threading.main_thread()
    return handle
