"""Implements the compile engine: runs units inside `torch.compile`, which keeps what the plan keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from recollect.plans.action import Action

if TYPE_CHECKING:
    from recollect.engine.compiled.partitioner import Partition


def compile_forward(
    forward: Callable[..., Any],
    actions: Mapping[str, Action] | None,
    *,
    on_partition: Callable[[Partition], None] | None = None,
) -> Callable[..., Any]:
    """Compile the forward of a unit, such that it saves what its plan keeps.

    Args:
        forward: bound to a module, whose path names of values leave out.
        actions: what happens to each value; None for PyTorch's own choice.
        on_partition: called with each cut that is made; without it, none is made where a cache on disk has the code.

    Returns:
        A function like it, which compiles when it is called. Equal actions share what was compiled for equal modules.
    """
    # Here: it imports the compiler.
    from recollect._torch_compile import compiled_whole
    from recollect.engine.compiled.partitioner import PlanPartitioner

    if actions is None and on_partition is None:
        return compiled_whole(forward, {})
    return compiled_whole(forward, {"custom_partitioner_fn": PlanPartitioner(actions, on_partition=on_partition)})
