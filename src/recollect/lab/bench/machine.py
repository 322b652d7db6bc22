"""What times depend on besides the code: the machine, and the C library's allocator. Imports no torch."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["few_objects", "keep_freed_memory", "processor_name"]

# Numbers of glibc's <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def processor_name() -> str:
    """Name the processor and how many of its cores this process may use."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores"


def keep_freed_memory() -> bool:
    """Have glibc keep what this process frees, and return whether that was possible.

    Else glibc gives freed memory back to the kernel after each large tensor and faults it in again, zeroed, for the next
    one: page faults are measured instead of arithmetic, and more of them of whoever allocates more often.
    """
    if not sys.platform.startswith("linux") or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_TRIM_THRESHOLD, -1)) and bool(mallopt(_M_MMAP_MAX, 0))


@contextmanager
def few_objects() -> Iterator[None]:
    """Leave what is there now (PyTorch itself) out of collections, and out of the sight of a meter, in a with-block.

    Else each collection takes longer than a small step. Tensors that a peak is measured of have to be made in the block.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
