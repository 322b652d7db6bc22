"""The line of the terminal that shows the stages: text, a bar where parts are counted, and the time so far."""

import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

# Drawing takes a millisecond, which what is timed meanwhile shall hardly notice.
_DRAWN_PER_S: Final = 2
_BAR_WIDTH: Final = 30


@dataclass
class _Stage:
    text: str
    total: int | None
    done: int = 0


class Line:
    """Shows the innermost of the stages that are under way, from some seconds after it was made until it is closed.

    Args:
        stream: the terminal.
        delay_s: seconds until the line appears.
    """

    def __init__(self, stream: TextIO, delay_s: float) -> None:
        self._stream = stream
        self._begin_s = time.monotonic()
        self._stages: list[_Stage] = []
        self._live: Live | None = None
        self._is_closed = False
        # Held while the line appears or goes; drawing has a lock of its own.
        self._lock = threading.Lock()
        self._timer = threading.Timer(delay_s, self._appear)
        self._timer.daemon = True
        self._timer.start()

    def begin(self, text: str, total: int | None) -> None:
        """Begin a stage within those under way."""
        self._stages.append(_Stage(text, total))
        self._draw()

    def advance(self) -> None:
        """Note that a part of the innermost stage is done."""
        self._stages[-1].done += 1
        self._draw()

    def end(self) -> None:
        """End the innermost stage."""
        self._stages.pop()
        if self._stages:
            self._draw()

    def close(self) -> None:
        """Take the line away, for good."""
        self._timer.cancel()
        with self._lock:
            self._is_closed = True
            if self._live is not None:
                with suppress(OSError):
                    self._live.stop()

    def _appear(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._live = Live(
                console=Console(file=self._stream),
                get_renderable=self._drawn,
                refresh_per_second=_DRAWN_PER_S,
                transient=True,
                # What is printed meanwhile goes above the line, if it goes to the terminal at all.
                redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
                redirect_stderr=sys.stderr is self._stream,
            )
            with suppress(OSError):
                self._live.start(refresh=True)

    def _draw(self) -> None:
        # The work goes on when its terminal has gone.
        if self._live is not None:
            with suppress(OSError):
                self._live.refresh()

    def _drawn(self) -> Table | Text:
        """Return the line as it is now."""
        # On another thread than the stages begin and end on.
        innermost = self._stages[-1:]
        if not innermost:
            return Text("")
        row = Table.grid(padding=(0, 1, 0, 0))
        cells: list[Text | ProgressBar] = [Text(f"recollect: {innermost[0].text}", no_wrap=True)]
        if innermost[0].total is not None:
            cells.append(ProgressBar(innermost[0].total, innermost[0].done, width=_BAR_WIDTH))
            cells.append(Text(f"{innermost[0].done}/{innermost[0].total}", no_wrap=True))
        cells.append(Text(f"{time.monotonic() - self._begin_s:.0f} s", style="dim", no_wrap=True))
        row.add_row(*cells)
        return row
