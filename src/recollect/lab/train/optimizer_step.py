"""Find a run's device, run one optimizer step, and compute the validation loss."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from recollect.errors import HardwareError
from recollect.lab.models.gpt import GPTModel
from recollect.lab.train.exchange import Exchange


def resolve_device(name: str) -> torch.device:
    """Return the device of a `--device` flag; "auto" is CUDA if available, else the CPU.

    Raises:
        HardwareError: PyTorch does not know the name, or the device is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (
        RuntimeError,
        AssertionError,
        NotImplementedError,
    ) as problem:  # PyTorch has no error class of its own for this
        here = ", ".join(["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))])
        raise HardwareError(
            f"--device {name}: cannot be used ({str(problem).splitlines()[0]}), expected auto or a device of this machine: "
            f"{here}. To plan for another one, add --fake --hardware H100 (recollect plan, explain, frontier)."
        ) from None
    return device


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    accumulation: int,
    clip_norm: float,
    exchange: Exchange | None = None,
) -> tuple[float, float]:
    """Run one optimizer step over `accumulation` micro-batches.

    Args:
        model: `model(tokens, labels)` returns an object with a scalar `.loss`.
        optimizer: over the parameters of `model`; gradients are None afterwards.
        batches: `accumulation` pairs of tokens and labels, each int64 [B, T].
        accumulation: divides each loss, so that gradients are those of the mean.
        clip_norm: largest norm of the gradient; 0 turns clipping off.
        exchange: with the other processes of the run; None: there are none.

    Returns:
        The mean loss of the micro-batches, and the norm of the gradient before clipping (nan if clipping is off); of all
        processes.
    """
    exchange = exchange or Exchange()
    loss = exchange.accumulate(model, batches, accumulation)
    exchange.reduce_gradients(model.parameters())
    norm = float("nan")
    if clip_norm:
        norm = exchange.clip(model.parameters(), clip_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)  # frees their memory for the next forward
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    if isinstance(inner, GPTModel):
        inner.update_expert_bias()
    return exchange.mean(loss), norm


@torch.no_grad()
def validation_loss(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    exchange: Exchange | None = None,
    total: int | None = None,
) -> float:
    """Return the mean loss over batches of equal size, without dropout and for the next token only.

    Args:
        model: as in training.
        batches: of this process.
        exchange: with the other processes of the run; None: there are none.
        total: batches of all processes that count; the last ones of some processes may be repeated, so that all run alike.
    """
    was_training = model.training
    model.eval()
    exchange = exchange or Exchange()
    losses = exchange.losses(model, batches)
    model.train(was_training)
    return exchange.mean_of_all(losses, total)
