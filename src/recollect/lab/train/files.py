"""Files of a run folder, where one process at a time trains.

They are written complete or not at all, even if the process is killed, and read back with clear errors.
"""

import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout  # a dependency of PyTorch

from recollect.errors import CheckpointError

_LOCK = "train.lock"
# Next to the lock: some systems forbid reading a locked file.
_HOLDER = "train.pid"
_SUFFIX = ".partial"


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a temporary file next to `path`, sync it to disk, then rename it to `path`.

    A process killed in between leaves the old `path` unchanged, and a `.partial` file for `remove_partial`. What is not a file
    (/dev/null, /dev/stdout, a pipe) is written to; a link stays one. If OSError is raised, since the folder is not writable or
    the disk is full, the temporary file is removed.
    """
    if path.exists() and (not path.is_file() or path.is_relative_to("/dev")):
        with path.open("wb") as device:
            write(device)
        return
    path = path.resolve()
    partial = unpublished(path)
    try:
        with partial.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    write_atomically(path, lambda file: file.write(text.encode()))


def read_object(path: Path, *, keys: Collection[str], advice: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as problem:
        raise CheckpointError(f"{path}: cannot be read as JSON ({problem}). {advice}") from None
    if not isinstance(found, dict) or not found.keys() >= set(keys):
        raise CheckpointError(f"{path}: expected a JSON object with {', '.join(keys)}. {advice}")
    return found


def unpublished(path: Path) -> Path:
    """Return the name of a file or folder while it is written or removed."""
    return path.with_name(path.name + _SUFFIX)


def publish(partial: Path, path: Path) -> None:
    sync_folder(partial)
    partial.rename(path)
    sync_folder(path.parent)


def remove(path: Path) -> None:
    """Remove a file, or a folder: completely, or partly if the process is killed, under a name for `remove_partial`."""
    if path.is_dir():
        if path.suffix != _SUFFIX:
            path = path.rename(unpublished(path))
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_partial(folder: Path) -> None:
    """Remove the temporary files and folders of killed processes from `folder`."""
    for path in folder.glob(f"*{_SUFFIX}"):
        remove(path)


def sync_folder(folder: Path) -> None:
    # The new name is on disk only once the folder is; Windows cannot open folders and does not need this.
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def only_run_in(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder, made if missing. The system frees it when the process ends, however it ends."""
    lock = FileLock(folder / _LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout:
        raise CheckpointError(
            f"run folder {folder}: {_holder(folder)} is already training there, and two runs would overwrite each other's "
            "files. Wait for it, end it, or choose a different --run-dir."
        ) from None
    except (OSError, NotImplementedError) as problem:
        raise CheckpointError(
            f"run folder {folder}: cannot be written ({getattr(problem, 'strerror', None) or problem}), expected a writable "
            "folder on a file system with locks. Choose a different --run-dir."
        ) from None
    try:
        write_text(
            folder / _HOLDER, f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%F %T')}\n"
        )
        yield
    finally:
        (folder / _HOLDER).unlink(missing_ok=True)
        lock.release()


def _holder(folder: Path) -> str:
    try:
        return (folder / _HOLDER).read_text().strip() or "another process"
    except OSError:  # it has only just begun, or is just ending
        return "another process"
