"""Let FSDP2 hold the parameters of a pipeline's stage whole, as it does from the stage's first forward to its last backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import nn

from recollect._torch_fsdp import fully_sharded_modules, is_fully_sharded
from recollect.arguments import check_kind


@contextmanager
def gathered_stage(stage: nn.Module) -> Iterator[None]:
    """Hold the parameters of a stage that FSDP2 shards whole within the block, and let backward reduce no gradients.

    That is what a stage has from its first forward to its last backward: `torch.distributed.pipelining` adds up whole
    gradients, and has FSDP2 reduce them at the end of the step. Record the stage in this block; else each of its
    micro-batches in flight counts with whole parameters of its own.

    Args:
        stage: of which nothing is gathered, or all. All ranks that share it have to call this together. A module to which
            `fully_shard` was not applied itself is left alone, as torch's schedules leave it.

    Returns:
        A context manager.

    Raises:
        ArgumentError: it is no module.

    Example:
        >>> import torch, recollect
        >>> from torch import nn
        >>> stage = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)))
        >>> with recollect.gathered_stage(stage):  # after fully_shard(stage)
        ...     profile = recollect.record(
        ...         stage, torch.randn(16, 32), loss_fn=torch.sum, gradients="accumulated", holds_output=False
        ...     )
    """
    check_kind("gathered_stage(stage)", "stage", stage, nn.Module, "torch.nn.Module")
    if not is_fully_sharded(stage):
        yield
        return
    for module in fully_sharded_modules(stage):
        module.unshard()
    _reduce_in_backward(stage, False)
    try:
        yield
    finally:
        _reduce_in_backward(stage, True)
        free_gathered(stage)


def free_gathered(model: nn.Module) -> None:
    """Free what FSDP2 has gathered of a model, as only a backward does otherwise; parameters are this rank's parts again."""
    for module in fully_sharded_modules(model):
        module.reshard()


def _reduce_in_backward(stage: nn.Module, reduces: bool) -> None:
    """Have backward reduce gradients and free parameters, or neither.

    Each may take itself for the last one, as by default: after another one, FSDP2 awaits the last, and PyTorch 2.15 refuses to
    let a schedule finalize by hand until then.
    """
    sharded = cast(Any, stage)
    sharded.set_reshard_after_backward(reduces)
    sharded.set_requires_gradient_sync(reduces)
