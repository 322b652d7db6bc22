"""Pictures of commands as a terminal shows them: `python -m pages.terminal` runs them in terminals and draws what they leave.

The pictures are SVG with text, which can be searched, and need no font from the network. Commands run in a folder of their own
with the files that they are about. A picture of measured numbers is stale when its words are, not when they come out otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import io
import os
import pty
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import textwrap
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from pages.figures import ROOT, Dated, Exact, Figure

__all__ = ["COMMANDS", "WIDTHS", "draw", "figures", "left_on_screen", "picture_of"]

WIDTHS = (80, 120)
_LARGE = "--size 8b --fake --hardware H100 --dtype bf16 --seq-length 4096"
_LOG = ROOT / "tests" / "unit" / "doctor" / "texts" / "memory-fragmented.txt"
_ROWS = 60
_TIE = "\xa0"
_FONT = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_CONTROLS = re.compile(r"\x1b\[(?![0-9;]*m)[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]")
_LINE_ERASED = re.compile(r"\r(?!\n)|\x1b\[2K")
# What measured times change: which layers of a plan do what, bars, and numbers.
_VARIES = re.compile(
    r"^decoder\.(?s:.*?)(?=^predicted)|[━╸╺]+|[+-]?\d[\d.,:]*(?: (?:[KMG]i)?B| [mu]?s\b)?", re.MULTILINE
)


@dataclass(frozen=True)
class Shown:
    """A command to show.

    Attributes:
        command: what is typed.
        is_measured: whether it measures times, so that each run leaves another picture.
        seconds: about how long it takes.
    """

    command: str
    is_measured: bool = False
    seconds: int = 10


COMMANDS = {
    "plan": Shown(f"recollect plan {_LARGE} --memory-budget 72GiB --out plan.json"),
    "frontier": Shown(f"recollect frontier {_LARGE}", seconds=15),
    "explain": Shown(
        f"recollect explain {_LARGE} --recompute-granularity selective --recompute-modules mlp", seconds=15
    ),
    "doctor": Shown("recollect doctor train.log", seconds=4),
    "train": Shown(
        "recollect train --data texts --size tiny --steps 60 --seq-length 128 --memory-budget 75% --run-dir runs/first",
        is_measured=True,
        seconds=20,
    ),
}


def picture_of(name: str, width: int) -> Path:
    """Return where the picture of a command is."""
    return ROOT / "docs" / "terminal" / f"{name}-{width}.svg"


def _prepare(folder: Path) -> None:
    """Put the files there that the commands are about: a log, and a few texts."""
    shutil.copy(_LOG, folder / "train.log")
    (folder / "texts").mkdir()
    paragraphs = (ROOT / "LICENSE").read_text(encoding="utf-8").split("\n\n")
    for number, paragraph in enumerate(paragraphs):
        (folder / "texts" / f"{number:03}.txt").write_text(paragraph, encoding="utf-8")


def _written(command: str, width: int) -> str:
    """Run a command in a terminal; return all that it wrote there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, width, 0, 0))
    # The line of progress comes and goes by the speed of the machine.
    environment = {**os.environ, "TERM": "xterm-256color", "RECOLLECT_PROGRESS": "0", "PYTHONPATH": str(ROOT / "src")}
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
        environment.pop(name, None)
    with tempfile.TemporaryDirectory() as folder:
        _prepare(Path(folder))
        words = [sys.executable, "-m", *shlex.split(command)]
        process = subprocess.Popen(words, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        parts = []
        with contextlib.suppress(OSError):  # how Linux says that nobody has the other end open
            while part := os.read(ours, 65536):
                parts.append(part)
        status = process.wait()
    os.close(ours)
    if status != 0:
        raise RuntimeError(f"{command}: exit status {status}\n{b''.join(parts).decode(errors='replace')}")
    return b"".join(parts).decode()


def left_on_screen(written: str) -> str:
    r"""Return the lines that a terminal still shows at the end, with their colours; of a line drawn over, the last drawing.

    Example:
        >>> left_on_screen("one\r\nstep 1\r\x1b[2Kstep 2\r\n\x1b[?25h")
        'one\nstep 2'
    """
    lines = []
    for line in written.replace("\r\n", "\n").split("\n"):
        drawings = [_CONTROLS.sub("", part) for part in _LINE_ERASED.split(line)]
        lines.append(next((part for part in reversed(drawings) if part), "").rstrip())
    return "\n".join(lines).rstrip("\n")


def _as_typed(command: str, width: int) -> str:
    r"""Return the command behind a prompt, over lines as a shell reads it, each flag with its value.

    Example:
        >>> print(_as_typed("recollect plan --size 8b --fake", 24))
        $ recollect plan \
              --size 8b --fake
    """
    tied = re.sub(r"(?<= )(--\S+) (?!--)", rf"\1{_TIE}", command)
    lines = textwrap.wrap(
        f"$ {tied}", width - 2, subsequent_indent="      ", break_long_words=False, break_on_hyphens=False
    )
    return " \\\n".join(lines).replace(_TIE, " ")


def draw(text: str, width: int) -> str:
    """Return a terminal with a text as SVG."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(text), soft_wrap=False)
    svg = console.export_svg(title=f"{width} columns", unique_id=f"columns-{width}")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    svg = svg.replace("Fira Code, monospace", _FONT)
    return "".join(line.rstrip() + "\n" for line in svg.splitlines() if line.strip())


def _screen(name: str, width: int) -> str:
    command = COMMANDS[name].command
    return f"{_as_typed(command, width)}\n{left_on_screen(_written(command, width))}"


def words_of(text: str) -> str:
    r"""Return a text without colours, and without what measured times change.

    Example:
        >>> words_of("decoder.layers.0  keep all\npredicted peak 11.8 MiB\nstep 60/60 ━━━ 1,200 tokens/s")
        'predicted peak step / tokens/s'
    """
    return " ".join(_VARIES.sub("", _COLOURS.sub("", text)).split())


def figures() -> tuple[Figure, ...]:
    """Return the pictures, with what tells whether they are stale."""
    return tuple(_figure(name, width) for name in COMMANDS for width in WIDTHS)


def _figure(name: str, width: int) -> Figure:
    path = picture_of(name, width).relative_to(ROOT).as_posix()
    command, seconds = f"python -m pages.terminal {name}", COMMANDS[name].seconds
    if COMMANDS[name].is_measured:
        return Dated(path, command, prints=f"{command} --print {width}", renews=True, seconds=seconds)
    return Exact(path, command, lambda: draw(_screen(name, width), width), seconds=seconds)


def main() -> None:
    """Draw every command at every width, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*COMMANDS, []], help="of the commands; default: all")
    parser.add_argument("--print", type=int, metavar="WIDTH", help="print what makes a picture of this width stale")
    flags = parser.parse_args()
    for name in flags.names or COMMANDS:
        if flags.print:
            print(words_of(_screen(name, flags.print)))
            continue
        for width in WIDTHS:
            out = picture_of(name, width)
            out.parent.mkdir(exist_ok=True)
            out.write_text(draw(_screen(name, width), width), encoding="utf-8")
            print(f"written: {out.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
