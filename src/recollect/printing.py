"""Print text on a console: terminals break lines between words; everywhere else one line stays one."""

import re
import textwrap

from rich.console import Console

_LEAST_COLUMNS = 80
# Text that people copy stays on one line, and a number stays with its unit.
_WHOLE = re.compile(r"pip install \S+|\d (?:[KMGT]i?)?B\b|\d %")
_LABEL = re.compile(r" *(?:\S+ {2,})?")
_HARD_SPACE = "\xa0"


def print_line(console: Console, text: str, *, style: str | None = None) -> None:
    """Print text unchanged; outside a terminal one line stays one line, which can be searched for."""
    if console.is_terminal:
        text = "\n".join(part for line in text.split("\n") for part in _wrapped(line, console.width))
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def columns_of(console: Console) -> int:
    """Return how wide a text that has its own layout may be: as wide as the terminal, or 80 columns."""
    return max(console.width, _LEAST_COLUMNS) if console.is_terminal else _LEAST_COLUMNS


def _wrapped(line: str, width: int) -> list[str]:
    """Wrap a line to a width, where its words allow it, aligned after its label if it begins with one."""
    if len(line) <= width:
        return [line]
    label = _LABEL.match(line)
    assert label is not None  # it matches nothing, too
    whole = _WHOLE.sub(lambda found: found[0].replace(" ", _HARD_SPACE), line)
    parts = textwrap.wrap(
        whole, width, subsequent_indent=" " * len(label[0]), break_long_words=False, break_on_hyphens=False
    )
    return [part.replace(_HARD_SPACE, " ") for part in parts]
