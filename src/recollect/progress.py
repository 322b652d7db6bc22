"""Shows the progress of recollect's work to waiting users.

Work that may take long runs in a `stage`; stages may be nested, and the innermost is shown, with the count of the innermost
that counts. On a terminal a line appears on standard error once the outermost has taken two seconds, and disappears with it;
elsewhere (a notebook, a file, a pipe) a line is added every ten seconds. Only the first of several processes prints anything,
and none with `RECOLLECT_PROGRESS=0` in the environment.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TextIO

from recollect.quantities import format_seconds

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

_SWITCH: Final = "RECOLLECT_PROGRESS"
_DELAY_S: Final = 2.0
_EVERY_S: Final = 10.0
# Drawing takes a millisecond, which must hardly disturb code that is timed meanwhile.
_DRAWN_PER_S: Final = 2


@contextmanager
def stage(text: str, total: int | None = None) -> Iterator[Callable[[], None]]:
    """Describe the work of the block; yields a function to call after each of `total` parts."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    outermost = not _lines
    line = _new_line() if outermost else _lines[0]
    if line is None:
        yield lambda: None
        return
    if outermost:
        _lines.append(line)
    begun = line.begin(text, total)
    try:
        yield lambda: line.advance(begun)
    finally:
        line.end()
        if outermost:
            _lines.clear()
            line.close()


@dataclass
class _Stage:
    text: str
    total: int | None
    done: int = 0
    begin_s: float = field(default_factory=time.monotonic)

    def count(self, separator: str) -> str:
        return f"{self.done}{separator}{self.total}"

    def left(self) -> str:
        """Return how long the rest takes at this pace; "" if nothing is known yet."""
        if not self.done or self.total is None or self.done >= self.total:
            return ""
        rest_s = (time.monotonic() - self.begin_s) / self.done * (self.total - self.done)
        return f"about {_whole(rest_s)} left"


def _appear(reference: weakref.ref[_Line]) -> None:
    if (line := reference()) is not None:
        line.appear()


class _Line:
    """Shows the stages that are under way, from some seconds after it was made until it is closed.

    On a terminal it is one line, drawn again and again; else lines follow each other.
    """

    def __init__(self, stream: TextIO, *, is_terminal: bool) -> None:
        self._stream, self._is_terminal = stream, is_terminal
        self._begin_s = time.monotonic()
        self._stages: list[_Stage] = []
        self._live: Live | None = None
        self._is_closed = False
        # Held while the line appears or disappears; drawing has its own lock.
        self._lock = threading.Lock()
        self._wait(_DELAY_S if is_terminal else _EVERY_S)

    def begin(self, text: str, total: int | None) -> _Stage:
        begun = _Stage(text, total)
        self._stages.append(begun)
        self._draw()
        return begun

    def advance(self, begun: _Stage) -> None:
        begun.done += 1
        self._draw()

    def end(self) -> None:
        self._stages.pop()
        if self._stages:
            self._draw()

    def close(self) -> None:
        self._timer.cancel()
        with self._lock:
            self._is_closed = True
            if self._live is not None:
                with suppress(OSError):
                    self._live.stop()

    def _wait(self, seconds: float) -> None:
        # In a cycle it would die in a garbage collection, where threads run code that would swallow an interrupt.
        self._timer = threading.Timer(seconds, _appear, (weakref.ref(self),))
        self._timer.daemon = True
        self._timer.start()

    def appear(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            # The work continues after its display is gone.
            with suppress(OSError, ValueError):
                if self._is_terminal:
                    self._live = self._started()
                else:
                    print(self._text(), file=self._stream, flush=True)
                    self._wait(_EVERY_S)

    def _started(self) -> Live:
        from rich.console import Console  # rich takes 0.1 s to import.
        from rich.live import Live

        live = Live(
            console=Console(file=self._stream),
            get_renderable=self._drawn,
            refresh_per_second=_DRAWN_PER_S,
            transient=True,
            # Output printed in the meantime appears above the line, if it reaches the terminal at all.
            redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
            redirect_stderr=sys.stderr is self._stream,
        )
        live.start(refresh=True)
        return live

    def _draw(self) -> None:
        if self._live is not None:
            with suppress(OSError):
                self._live.refresh()

    def _shown(self) -> tuple[str, _Stage | None, str]:
        """Return the innermost stage's text, the innermost stage that counts, and the time so far."""
        # Not on the thread that the stages begin and end on.
        stages = list(self._stages)
        counted = next((one for one in reversed(stages) if one.total is not None), None)
        text = f"recollect: {stages[-1].text}" if stages else "recollect"
        return text, counted, _whole(time.monotonic() - self._begin_s)

    def _text(self) -> str:
        text, counted, so_far = self._shown()
        count = [f"{counted.count(' of ')} done"] if counted is not None else []
        left = [counted.left()] if counted is not None and counted.left() else []
        return ", ".join([text, *count, f"{so_far} so far", *left])

    def _drawn(self) -> Table:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        text, counted, so_far = self._shown()
        cells: list[Text | ProgressBar] = [Text(text, no_wrap=True)]
        if counted is not None:
            cells.append(ProgressBar(counted.total, counted.done, width=15))
            cells.append(Text(counted.count("/"), no_wrap=True))
        left = counted.left() if counted is not None else ""
        cells.append(Text(left or so_far, style="dim", no_wrap=True))
        row = Table.grid(padding=(0, 1, 0, 0))
        row.add_row(*cells)
        return row


# That of the outermost stage that is under way, if it has one.
_lines: list[_Line] = []


def _new_line() -> _Line | None:
    """Return a line that appears later; None if nobody would read it."""
    if os.environ.get(_SWITCH) == "0" or os.environ.get("RANK", "0") != "0":
        return None
    try:
        return _Line(sys.stderr, is_terminal=sys.stderr.isatty())
    except (AttributeError, ValueError):
        return None  # Standard error is closed, or there is none.


def _whole(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 59.5 else format_seconds(seconds)
