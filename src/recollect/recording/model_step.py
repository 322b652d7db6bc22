"""Run a user's training step: pass the batch, find the loss, and restore the model's state afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from recollect._torch_private import DATA_DEPENDENT, tree_leaves
from recollect.errors import RecollectError, RecordError

LossFunction = Callable[[Any], torch.Tensor]
T = TypeVar("T")


def run_forward(model: nn.Module, batch: Any, loss_fn: LossFunction | None) -> torch.Tensor:
    """Run the model on a batch and return the loss, a scalar that requires grad.

    Raises:
        RecordError: the model rejected the batch; there is no loss; or the loss is not a scalar, or depends on no trained
            parameter.
    """
    name = type(model).__name__
    try:
        output = call_model(model, batch)
    except (TypeError, ValueError, RuntimeError, IndexError, KeyError) as error:
        if isinstance(error, (torch.OutOfMemoryError, RecollectError, *DATA_DEPENDENT)):
            raise
        raise RecordError(
            f"{name} rejected the batch ({describe_batch(batch)}): {type(error).__name__}: {error}. A dict is passed as "
            "keywords, a tuple as positions, anything else as the only argument."
        ) from error
    loss = find_loss(output, name) if loss_fn is None else loss_fn(output)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        raise RecordError(
            f"the loss of {name} is {what}, expected a tensor with one element: reduce it, e.g. loss.mean()."
        )
    if not loss.requires_grad:
        raise RecordError(
            f"the loss of {name} does not require grad: no parameter that it depends on is trained, or forward ran under "
            "torch.no_grad(). Set requires_grad on what you train."
        )
    return loss


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call a model with a dict as keywords, a tuple or list as positions, anything else as its only argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


def find_loss(output: Any, name: str) -> Any:
    """Return the loss in a model's output: the output itself, its `loss` attribute, or its "loss" entry."""
    if isinstance(output, torch.Tensor):
        return output
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        raise RecordError(
            f"found no loss in the output of {name}, a {type(output).__name__}: expected `output.loss`, output['loss'] or a "
            "scalar tensor. Put labels into the batch, or pass loss_fn=lambda output: ..."
        )
    return loss


def describe_batch(batch: Any) -> str:
    """Describe a batch: "tokens int64[4, 512], labels int64[4, 512]"."""
    if isinstance(batch, torch.Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape)}"
    if isinstance(batch, Mapping):
        return ", ".join(f"{key} {describe_batch(item)}" for key, item in batch.items())
    if isinstance(batch, (tuple, list)):
        return ", ".join(describe_batch(item) for item in batch)
    return type(batch).__name__


def device_of(model: nn.Module, batch: Any) -> torch.device:
    """Return the device of the step: that of the first parameter, or of the batch if the model is on meta."""
    candidates = [*model.parameters(), *(t for t in tree_leaves(batch) if isinstance(t, torch.Tensor))]
    return next((t.device for t in candidates if t.device.type != "meta"), torch.device("cpu"))


def resident_tensors(
    model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer | None = None
) -> list[torch.Tensor]:
    """Return the tensors in memory before a step: parameters, gradients, buffers, batch, and optimizer state so far."""
    parameters = list(model.parameters())
    state = [] if optimizer is None else tree_leaves([dict(entry) for entry in optimizer.state.values()])
    found = [*parameters, *(p.grad for p in parameters), *model.buffers(), *tree_leaves(batch), *state]
    return [item for item in found if isinstance(item, torch.Tensor)]


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Restore gradients, buffers and random generators after the block, in which steps may run."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    cuda_devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=cuda_devices), restored_buffers(model):
            for parameter, _ in gradients:
                parameter.grad = None
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextmanager
def restored_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers (batch norm statistics) after the block."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
