"""`fit`: record, plan and apply in one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from recollect.applying import apply
from recollect.planning.loss_chunks import LossChunks, plan_with_chunks
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile
from recollect.recording.model_step import LossFunction
from recollect.recording.record import record


def fit(
    model: nn.Module,
    batch: Any,
    budget: int | str,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    loss_fn: LossFunction | None = None,
    accumulates_gradients: bool = False,
    loss_chunks: LossChunks = 1,
) -> Plan:
    """Fit the model's training step into a memory budget with the least recompute: record, plan and apply.

    Args:
        model: any module with repeated layers. It is not edited; only its layers' `forward` is wrapped.
        batch: a tensor, tuple or dict, as large as in training.
        budget: bytes of the whole step (parameters, gradients, optimizer state, kept values, workspaces), as an int or
            text: "16GiB", "80GB", "60%" of the peak without recompute, "90% of the device" (CUDA).
        optimizer: counts with its state and the workspace of its step.
        loss_fn: from the model's output to a scalar; see `record`.
        accumulates_gradients: gradients exist already when the step begins.
        loss_chunks: parts in which LM head and loss are computed, so that only one part's logits are alive; see
            `chunked_cross_entropy`. 1: as the model does, so that gradients keep their bits. "auto": as many as the fastest
            plan needs, and 1 if that is as fast; records up to four times.

    Returns:
        The plan, now applied to the model. `recollect.applied_to(model)` returns the handle that removes it.

    Raises:
        BudgetTooSmallError: no plan fits; names the least possible peak and its unit.
        ChunkedLossError: the model's loss cannot be computed in chunks.
        QuantityError, UnsupportedModelError, AlreadyAppliedError, RecordError: see `plan` and `record`.

    Example:
        >>> import torch, recollect
        >>> from recollect.lab.models.architectures import llama_config
        >>> from recollect.lab.models.gpt import GPTModel
        >>> model = GPTModel(llama_config(num_layers=4, hidden_size=64, num_attention_heads=4, vocab_size=128))
        >>> tokens = torch.randint(0, 128, (4, 64))
        >>> plan = recollect.fit(model, {"tokens": tokens, "labels": tokens}, budget="70%")
        >>> plan.predicted_peak_bytes <= plan.budget_bytes
        True
    """

    def record_with(num_chunks: int) -> Profile:
        return record(
            model,
            batch,
            optimizer=optimizer,
            loss_fn=loss_fn,
            accumulates_gradients=accumulates_gradients,
            loss_chunks=num_chunks,
        )

    chosen = plan_with_chunks(record_with, budget, loss_chunks).plan
    apply(model, chosen)
    return chosen
