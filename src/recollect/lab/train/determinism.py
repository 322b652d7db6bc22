"""Make CUDA give the same bits in every run; a CPU always does."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def deterministic_kernels(*, wanted: bool) -> Iterator[None]:
    """Use CUDA's deterministic kernels in a with-block, if `wanted` and if CUDA is available.

    Raises:
        RuntimeError: from an op in the block that has no deterministic kernel; `--no-deterministic` allows any.
    """
    if not (wanted and torch.cuda.is_available()):
        yield
        return
    # cuBLAS reads this once, at its start; without it, matrix products raise in deterministic mode.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    module: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), module.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # Filling would write every new tensor twice, and no op here reads uninitialised memory.
    module.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        module.fill_uninitialized_memory = before[1]
