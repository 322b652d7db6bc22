"""Cases that programs run when a test asks for them: what nobody asks for does not run, and imports are paid for once."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from forked_processes import ForkedProcess

Row = dict[str, Any]
_SECONDS_BETWEEN_LOOKS = 0.02
# What takes longer hangs: ten times what the longest case takes on a busy machine.
_LONGEST_CASE_S = 400


class AskedCases:
    """What each of some processes found in a case, which they run when it is first asked for.

    Args:
        started: processes of one program, which calls `case_server.serve`.
    """

    def __init__(self, started: Sequence[ForkedProcess]) -> None:
        self._started = started
        self._rows: dict[str, list[Row]] = {}

    def __getitem__(self, name: str) -> list[Row]:
        if name not in self._rows:
            for process in self._started:
                process.write(f"{name}\n")
            self._rows[name] = self._wait(name)
        return self._rows[name]

    def last(self, name: str) -> list[Row]:
        """Return the rows of a case after which the processes end, as one of them waits for the end of another."""
        for process in self._started:
            process.write(f"{name}\n")
        # What is written to a pipe is lost if it ends before its reader opens it; by the first row, each has.
        self._wait(name, any)
        for process in self._started:
            process.end_input()
        return self._wait(name)

    def _wait(self, name: str, enough: Callable[[Iterable[bool]], bool] = all) -> list[Row]:
        end_s = time.monotonic() + _LONGEST_CASE_S
        while True:
            has_ended = [process.poll() is not None for process in self._started]
            rows = [_row(process.written(), name) for process in self._started]
            if any(process.returncode for process in self._started) or time.monotonic() > end_s:
                break
            if enough(row is not None or ended for row, ended in zip(rows, has_ended, strict=True)):
                return [row for row in rows if row is not None]
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        for process in self._started:
            process.kill()
        said = [process.communicate()[1][-4000:] for process in self._started]
        raise AssertionError(f"case {name!r} failed, or took more than {_LONGEST_CASE_S} s:\n" + "\n".join(said))

    def end(self) -> None:
        for process in self._started:
            process.end_input()
            process.kill()
            process.communicate()


@contextmanager
def asked_cases(started: Sequence[ForkedProcess]) -> Iterator[AskedCases]:
    """Ask processes for cases; they end with the context."""
    cases = AskedCases(started)
    try:
        yield cases
    finally:
        cases.end()


def _row(written: str, name: str) -> Row | None:
    """Return the row of a case, which is there as soon as its line is whole; libraries write to the same stream."""
    case = f'{{"case": {json.dumps(name)}'
    begins = f"{case}, ", f"{case}}}"
    lines = [line for line in written.splitlines(keepends=True) if line.startswith(begins) and line.endswith("\n")]
    return json.loads(lines[-1]) if lines else None
