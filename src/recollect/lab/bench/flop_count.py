"""Count hardware FLOPs: all matrix products that run, including recomputed ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recollect._torch_private import TorchDispatchMode
from recollect.costs.op_work import flops_of

__all__ = ["FlopCount"]


class FlopCount(TorchDispatchMode):
    """Count FLOPs while active; PyTorch's `FlopCounterMode` misses attention on the CPU and counts causal attention as full.

    Attributes:
        flops: FLOPs of all ops so far.

    Example:
        >>> import torch
        >>> with FlopCount() as count:
        ...     product = torch.ones(2, 3) @ torch.ones(3, 5)
        >>> count.flops
        60.0
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled parts run compiled, as in training; their FLOPs are then not counted."""
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an op and count it."""
        output = func(*args, **(kwargs or {}))
        self.flops += flops_of(func, args, kwargs or {}, output)
        return output
