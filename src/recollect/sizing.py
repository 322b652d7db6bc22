"""`largest_batch`: which batch fits a budget, and which is the fastest?"""

import os
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from recollect.applying import without_plans
from recollect.arguments import check_kind
from recollect.costs.hardware import Hardware
from recollect.errors import ArgumentError, RecordError
from recollect.planning.batch_search import MAX_SIZE, LargestBatch, search_batches
from recollect.profile.profile import Profile
from recollect.recording.model_step import LossFunction
from recollect.recording.optimizers import Optimizers, check_optimizers
from recollect.recording.record import record
from recollect.recording.step_recording import Gradients
from recollect.tracebacks import lets_go


@lets_go
def largest_batch(
    model: nn.Module,
    make_batch: Callable[[int], Any],
    budget: int | str,
    *,
    optimizer: Optimizers = None,
    loss_fn: LossFunction | None = None,
    hardware: str | os.PathLike[str] | Hardware | None = None,
    units: Iterable[str] | None = None,
    holds_output: bool = True,
    gradients: Gradients = "held",
    loss_chunks: int = 1,
    tokens_each: int = 1,
    multiple_of: int = 1,
    max_size: int = MAX_SIZE,
    along: str = "size",
) -> LargestBatch:
    """Find the largest batch whose step fits a budget: without recompute, with full recompute, and with a plan.

    And the one with most tokens per second, since a larger batch is not always faster. Batches of a few sizes are recorded on
    fake tensors, so nothing is computed, and the model may be on the meta device. The largest sizes are verified: each was
    recorded, and so was the next one, which does not fit.

    Args:
        model: any module, in the mode in which it will be trained. A plan that it has is suspended.
        make_batch: from a size (the number of sequences, say, or their length) to a batch as for `record`. Only shapes and
            dtypes count, so tensors on the meta device are enough.
        budget: bytes of the whole step, as an int or text: "16GiB", "80GB", "90% of the device".
        optimizer: one, or several; see `record`.
        loss_fn: from the model's output to a scalar; see `record`.
        hardware: the hardware to model times for; see `record`.
        units: module paths of the layers to plan, if they are not found; see `record`.
        holds_output: the loop holds the model's output until the next one replaces it; see `record`.
        gradients: the gradients of the last step, when the next one begins; see `record`.
        loss_chunks: parts in which LM head and loss are computed; see `record`.
        tokens_each: tokens that one more of the size adds to the batch: the length, if the size is the number of sequences.
        multiple_of: try only multiples of this.
        max_size: try no larger size.
        along: a word for the size, for messages.

    Returns:
        The answers, and all sizes that were recorded: about ten. Predicted memory grows with the size; where it does not,
        there may be larger sizes that fit.

    Raises:
        ArgumentError: the model is not a module, or `make_batch` not a function.
        BudgetTooSmallError: not even the smallest size fits; names the least possible peak and its unit.
        ConfigError: `tokens_each`, `multiple_of` or `max_size` is below 1, or no multiple is within `max_size`.
        QuantityError: the budget is not a number of bytes, or relative to the peak of one batch.
        RecordError: `make_batch` returns None, or does not use its argument; the model rejects a batch; see `record`.
        UnsupportedModelError, HardwareError, ChunkedLossError: see `record`.

    Example:
        >>> import torch, recollect
        >>> from torch import nn
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)))
        >>> make_batch = lambda size: torch.empty(size, 128, 32, device="meta")
        >>> found = recollect.largest_batch(model, make_batch, "2MiB", loss_fn=torch.sum)
        >>> found.without_recompute.size < found.planned.size
        True
    """
    check_kind("largest_batch(model, make_batch, budget)", "model", model, nn.Module, "torch.nn.Module")
    if not callable(make_batch):
        raise ArgumentError(
            f"recollect.largest_batch(model, make_batch, budget): got an object of class {type(make_batch).__name__} as "
            "make_batch, expected a function from a size to a batch, such as lambda size: torch.empty(size, 3, 224, 224)."
        )
    check_optimizers(model, optimizer)
    paths = None if units is None else tuple(units)

    def record_size(size: int) -> Profile:
        batch = make_batch(size)
        if batch is None:
            raise RecordError(f"make_batch({size}) returned None, expected a batch: a tensor, tuple or dict.")
        return record(
            model,
            batch,
            optimizer=optimizer,
            loss_fn=loss_fn,
            fake=True,
            hardware=hardware,
            units=paths,
            holds_output=holds_output,
            gradients=gradients,
            loss_chunks=loss_chunks,
        )

    with without_plans(model):
        return search_batches(
            record_size, budget, tokens_each=tokens_each, multiple_of=multiple_of, max_size=max_size, along=along
        )
