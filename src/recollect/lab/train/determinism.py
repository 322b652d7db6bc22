"""The same bits from run to run on CUDA; a CPU gives them anyway."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def deterministic_kernels(*, wanted: bool) -> Iterator[None]:
    """Use CUDA's deterministic kernels inside this context, if `wanted` and if there is CUDA.

    Args:
        wanted: False makes this context do nothing.

    Yields:
        Nothing.

    Raises:
        RuntimeError: from an op inside, if it has no deterministic kernel; `--no-deterministic` allows any.
    """
    if not (wanted and torch.cuda.is_available()):
        yield
        return
    # cuBLAS reads this once, when it starts; without it, deterministic mode refuses to multiply matrices.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    module: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), module.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    module.fill_uninitialized_memory = (
        False  # would write every new tensor twice, and no op here reads unwritten memory
    )
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        module.fill_uninitialized_memory = before[1]
