"""Output of the commands: tables on the console, and files and pictures that are checked before the work begins."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console

from recollect.errors import RecollectError
from recollect.lab.train.files import write_text
from recollect.pictures.page import require_plotly
from recollect.pictures.style import require_matplotlib
from recollect.printing import print_line
from recollect.profile.profile import Profile


def wide_console(console: Console, width: int) -> Console:
    """Return a console of a given width unless a terminal has its own: in a file, no column has to be broken."""
    return console if console.is_terminal else Console(width=width, file=console.file)


def describe_step(profile: Profile) -> str:
    """Return model and batch of a recorded step, and what its times are of, in one line."""
    times = f"times {'modelled for' if profile.fake else 'measured on'} {profile.device_name}"
    return f"{profile.model_class}, {profile.batch}; {times}"


def check_folder(path: Path, flag: str = "") -> None:
    """Check that a file can be written, before the work begins whose result it takes.

    Raises:
        RecollectError: its folder is missing or not writable, or it is a folder itself; names the flag and the file.
    """
    problem = ""
    if not path.parent.is_dir():
        problem = f"no folder {path.parent}"
    elif path.is_dir():
        problem = "Is a directory"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        problem = "Permission denied"
    if problem:
        raise RecollectError(
            f"{flag} {path}: cannot be written ({problem}), expected a file in a writable folder.".lstrip()
        )


def write_file(path: Path, text: str, console: Console, *, flag: str = "", note: str = "") -> None:
    """Write a file atomically and say so; `note` is added to the message.

    Raises:
        RecollectError: the file cannot be written; names the flag and the file.
    """
    try:
        write_text(path, text)
    except OSError as problem:
        raise RecollectError(
            f"{flag} {path}: cannot be written ({problem.strerror}), expected a file in a writable folder.".lstrip()
        ) from None
    print_line(console, f"Written to {path}{note}.")


def check_pictures(png: Path | None, html: Path | None) -> None:
    """Check that the requested pictures can be made.

    Raises:
        RecollectError: a package or the file's folder is missing.
    """
    if png is not None:
        require_matplotlib()
    if html is not None:
        require_plotly()
    for flag, path in (("--png", png), ("--html", html)):
        if path is not None:
            check_folder(path, flag)
