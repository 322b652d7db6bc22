"""Files that are either wholly there or not there, whatever kills the process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

_SUFFIX = ".partial"


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let `write` fill a temporary file beside `path`, bring it to disk, then give it its name.

    A process killed in between leaves the old `path` as it was and a `.partial` file that `remove_partial` clears.

    Args:
        path: the file to be made or replaced.
        write: writes the content into the open file that it is given.

    Raises:
        OSError: the folder is not writable or the disk is full; the temporary file is gone then.
    """
    partial = path.with_name(path.name + _SUFFIX)
    try:
        with partial.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write `text` atomically."""
    write_atomically(path, lambda file: file.write(text.encode()))


def remove_partial(folder: Path) -> None:
    """Remove what killed writers left in `folder`."""
    for path in folder.glob(f"*{_SUFFIX}"):
        path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    # The new name itself is on disk only once the folder is; Windows cannot open a folder and needs no such call.
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
