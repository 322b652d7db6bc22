"""Count hardware FLOPs: all matrix products that run, including recomputed ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recollect.costs.op_work import flops_of
from recollect.engine.op_mode import OpMode

__all__ = ["FlopCount"]


class FlopCount(OpMode):
    """Count FLOPs while active; PyTorch's `FlopCounterMode` misses attention on the CPU and counts causal attention as full.

    The FLOPs of compiled parts are not counted: they run compiled, as in training.

    Attributes:
        flops: FLOPs of all ops so far.

    Example:
        >>> import torch
        >>> with FlopCount() as count:
        ...     product = torch.ones(2, 3) @ torch.ones(3, 5)
        >>> count.flops
        60.0
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an op and count it."""
        output = func(*args, **(kwargs or {}))
        self.flops += flops_of(func, args, kwargs or {}, output)
        return output
