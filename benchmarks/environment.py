"""What the numbers depend on besides the code: the C library's allocator, the machine, the commit. Imports no torch."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

# Without these glibc gives freed memory back to the kernel after each large tensor and faults it in again, zeroed, for
# the next one: page faults instead of arithmetic, and more of them for whoever allocates more often.
_ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_MMAP_MAX_": "0"}


def settle_allocator() -> None:
    """Start this script again with glibc set to keep freed memory, unless it is; call before torch is imported."""
    if all(os.environ.get(name) == value for name, value in _ALLOCATOR.items()):
        return
    if "torch" in sys.modules:
        raise RuntimeError("settle_allocator: torch is imported already, expected to be called first.")
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **_ALLOCATOR})


def settle_garbage() -> None:
    """Leave what is there now (PyTorch itself) out of all later collections, which would take longer than a small step.

    Call before tensors are made that a peak is measured of: what is left out, the meter does not find either.
    """
    gc.collect()
    gc.freeze()


def commit() -> str:
    """Return the commit that runs, marked where tracked files of the library or the benchmarks differ from it."""

    def git(*arguments: str) -> str:
        here = Path(__file__).parent
        done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        name = git("rev-parse", "--short=10", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "../src", "*.py")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name}-changed" if changed else name
