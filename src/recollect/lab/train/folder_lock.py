"""Lets one process at a time train in a run folder: two would write over each other's metrics and checkpoints."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout  # a dependency of PyTorch

from recollect.errors import CheckpointError
from recollect.lab.train.files import write_text

__all__ = ["only_run_in"]

_LOCK = "train.lock"
# Beside the lock: some systems let nobody read a locked file.
_HOLDER = "train.pid"


@contextmanager
def only_run_in(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder. The system frees it when the process ends, however it ends.

    Args:
        folder: created if missing.

    Raises:
        CheckpointError: another process, which is named, trains in the folder; or it cannot be written.
    """
    lock = FileLock(folder / _LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout:
        raise CheckpointError(
            f"run folder {folder}: got a second run while {_holder(folder)} trains there, expected one run at a time, since "
            "they would write over each other's files. Wait for it, end it, or choose another --run-dir."
        ) from None
    except (OSError, NotImplementedError) as problem:
        raise CheckpointError(
            f"run folder {folder}: cannot be written ({getattr(problem, 'strerror', None) or problem}), expected a writable "
            "folder on a file system with locks. Choose another --run-dir."
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
