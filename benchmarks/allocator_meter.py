"""A meter that shares nothing with recollect's: counts in C what PyTorch's CPU allocator asks of the C library.

It needs no profiler, so it runs all the time, also while recollect measures; it sees all threads, and every byte from the
moment it was asked to watch. A program that is started in a `metered_environment` can read it with `AllocatorMeter()`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["AllocatorMeter", "can_be_built", "is_loaded", "metered_environment"]

_SOURCE = Path(__file__).with_suffix(".c")


def can_be_built() -> bool:
    """Say whether there is a C compiler, and a C library whose allocator can be wrapped."""
    return sys.platform == "linux" and shutil.which("cc") is not None


def is_loaded() -> bool:
    """Say whether this process was started in a `metered_environment`, or forked from one that was."""
    return hasattr(ctypes.CDLL(None), "allocator_meter_watch")


@contextmanager
def metered_environment() -> Iterator[dict[str, str]]:
    """Yield the variables with which to start programs under the meter, on one thread."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "allocator_meter.so"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-pthread", "-o", str(library), str(_SOURCE)], check=True)
        yield {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}


class AllocatorMeter:
    """Bytes alive, and the most since the last `restart`; both without what was there before the first meter.

    Raises:
        RuntimeError: the process was not started in a `metered_environment`.

    Example: `meter = AllocatorMeter(); model = build(); step(); meter.peak_bytes()`.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        if not is_loaded():
            raise RuntimeError("AllocatorMeter: start this program in a metered_environment")
        self._library.allocator_meter_now.restype = ctypes.c_int64
        self._library.allocator_meter_peak.restype = ctypes.c_int64
        self._library.allocator_meter_watch(*map(ctypes.c_size_t, _code_of("libc10.so")))

    def now_bytes(self) -> int:
        """Return the bytes alive."""
        return int(self._library.allocator_meter_now())

    def peak_bytes(self) -> int:
        """Return the most bytes alive at any moment since the last `restart`."""
        return int(self._library.allocator_meter_peak())

    def restart(self) -> None:
        """Forget the peak."""
        self._library.allocator_meter_restart()


def _code_of(library: str) -> tuple[int, int]:
    """Return the range of addresses of a library of PyTorch's."""
    import torch  # noqa: F401, loads it

    with Path("/proc/self/maps").open() as file:
        ranges = [line.split()[0].split("-") for line in file if line.rstrip().endswith(library)]
    return int(ranges[0][0], 16), int(ranges[-1][1], 16)
