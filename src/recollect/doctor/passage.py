"""`Passage`: a line of a text with what stands around it.

Texts are read line by line, so that logs may have any size.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

BEFORE = 150  # lines: a traceback through a trainer has 60 to 120
AFTER = 16
_WITHOUT_HEAD = 12  # of a traceback that does not say where it begins
_LONGEST_SHOWN = 200  # columns of a line that is quoted
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# `torchrun` and `srun --label` put the rank before each line, and lines of several ranks may alternate.
_RANK = re.compile(r"^(?:(?:\[(?:rank|default)?\d+\]:?|\d+:|\d+(?:\.\d+){3}:|\(\w+ pid=\d+[^)]*\)) ?)+")
_TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True, slots=True)
class Passage:
    """A line, and the lines around it of the same rank.

    Attributes:
        place: file and line number, such as "train.log:120".
        line: the line, without the rank that may stand before it.
        before: up to 150 lines before it.
        after: up to 16 lines after it.
    """

    place: str
    line: str
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """All of it."""
        return "\n".join((*self.before, self.line, *self.after))

    @property
    def traceback(self) -> tuple[str, ...]:
        """The frames that end in this line, outermost first; without a head, as of pytest and some logs, the lines before."""
        starts = [i for i, line in enumerate(self.before) if _TRACEBACK in line]
        return self.before[starts[-1] + 1 :] if starts else self.before[-_WITHOUT_HEAD:]

    def quoted(self) -> str:
        """Return the line after its place, shortened if it is long."""
        text = self.line.strip()
        shown = text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]} ..."
        return f"{self.place}: {shown}"


def passages(lines: Iterable[str], name: str, is_wanted: Callable[[str], bool]) -> Iterator[Passage]:
    """Yield a passage for each wanted line, holding only the lines around it.

    Args:
        lines: of the text, with or without line ends.
        name: of the text, for the places.
        is_wanted: whether a line is the middle of a passage.

    Yields:
        Passages in order.
    """
    before: deque[tuple[str, str]] = deque(maxlen=BEFORE)
    waiting: deque[tuple[int, str, str, tuple[tuple[str, str], ...], list[tuple[str, str]]]] = deque()
    for number, raw in enumerate(lines, start=1):
        text = raw.rstrip("\r\n")
        if "\x1b" in text:
            text = _COLOURS.sub("", text)
        rank = match[0] if (match := _RANK.match(text)) else ""
        labelled = (rank, text[len(rank) :])
        while waiting and len(waiting[0][4]) >= AFTER:
            yield _passage(name, *waiting.popleft())
        for entry in waiting:
            entry[4].append(labelled)
        if is_wanted(text):
            waiting.append((number, rank, labelled[1], tuple(before), []))
        before.append(labelled)
    for entry in waiting:
        yield _passage(name, *entry)


def _passage(
    name: str,
    number: int,
    rank: str,
    line: str,
    before: tuple[tuple[str, str], ...],
    after: list[tuple[str, str]],
) -> Passage:
    own = (tuple(text for label, text in lines if label == rank) for lines in (before, after))
    return Passage(f"{name}:{number}", line, *own)
