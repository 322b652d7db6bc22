"""Name the machine, and keep its allocator and Python's garbage collector out of measured times. Imports no torch."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from recollect.costs.hardware_table import processor_model

# Constants from glibc's <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def processor_name() -> str:
    """Name the processor and how many of its cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{processor_model()}, {cores} cores"


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory, and return whether that was possible.

    By default glibc returns the memory of each large tensor to the kernel, and the next tensor faults it in again, zeroed.
    Measured times would then contain page faults, and more of them the more often a step allocates.
    """
    if not sys.platform.startswith("linux") or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_TRIM_THRESHOLD, -1)) and bool(mallopt(_M_MMAP_MAX, 0))


@contextmanager
def few_objects() -> Iterator[None]:
    """Exclude all current objects (PyTorch itself) from garbage collection and from meters in a with-block.

    Otherwise each collection takes longer than a small step. Create tensors whose peak is to be measured inside the block.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
