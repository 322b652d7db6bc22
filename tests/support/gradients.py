"""One training step as a dictionary of tensors, and the demand that two of them agree to the bit."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from recollect.engine.content import has_same_bits
from zoo import Batch, Case

LossFn = Callable[[Any], Tensor]
Step = dict[str, Tensor]


class DifferentStepsError(AssertionError):
    """Two training steps did not compute the same numbers."""


def call(model: nn.Module, batch: Batch) -> Any:
    """`model(batch)`, `model(*batch)` or `model(**batch)`."""
    if isinstance(batch, dict):
        return model(**batch)
    if isinstance(batch, tuple):
        return model(*batch)
    return model(batch)


def loss_of(output: Any, loss_fn: LossFn | None = None) -> Tensor:
    """The scalar to differentiate: of `loss_fn`, else the output's own."""
    if loss_fn is not None:
        return loss_fn(output)
    loss: Tensor = output if isinstance(output, Tensor) else output["loss"]
    return loss


def gradients(model: nn.Module, batch: Batch, loss_fn: LossFn | None = None, seed: int = 0) -> Step:
    """Forward and backward once, under `seed`; leaves buffers and gradients as if it had not run.

    Returns:
        copies under the names "loss", "gradient of <parameter>", "gradient of input <i or key>" (where the batch
        requires one) and "buffer <name>" (its value after the step).
    """
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    clear(model, batch)
    torch.manual_seed(seed)
    loss = loss_of(call(model, batch), loss_fn)
    loss.backward()
    step = collect(model, batch, loss)
    clear(model, batch)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
    return step


def step_of(case: Case, model: nn.Module, seed: int = 0) -> Step:
    """`gradients` of a zoo entry's own batch and loss."""
    return gradients(model, case.data(), case.loss_fn, seed)


def collect(model: nn.Module, batch: Batch, loss: Tensor) -> Step:
    step = {"loss": loss.detach().clone()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            step[f"gradient of {name}"] = parameter.grad.clone()
    for key, tensor in _tensors(batch):
        if tensor.grad is not None:
            step[f"gradient of input {key}"] = tensor.grad.clone()
    for name, buffer in model.named_buffers():
        step[f"buffer {name}"] = buffer.clone()
    return step


def clear(model: nn.Module, batch: Batch) -> None:
    model.zero_grad()
    for _, tensor in _tensors(batch):
        tensor.grad = None


def _tensors(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    if isinstance(batch, Tensor):
        items: Any = [("0", batch)]
    else:
        items = batch.items() if isinstance(batch, dict) else enumerate(batch)
    for key, item in items:
        if isinstance(item, Tensor) and item.is_leaf:
            yield str(key), item


def assert_same_gradients(expected: Mapping[str, Tensor], got: Mapping[str, Tensor], what: str = "") -> None:
    """Raise unless both steps have the same names and the same bits; `what` names the second one in the message.

    Raises:
        DifferentStepsError: names the tensors only one side has, or the first that differs and by how much.
    """
    prefix = f"{what}: " if what else ""
    missing, added = sorted(expected.keys() - got.keys()), sorted(got.keys() - expected.keys())
    if missing or added:
        raise DifferentStepsError(f"{prefix}the steps have different tensors: missing {missing}, unexpected {added}")
    differing = [name for name in expected if not has_same_bits(expected[name], got[name])]
    if differing:
        first = differing[0]
        raise DifferentStepsError(
            f"{prefix}{len(differing)} of {len(expected)} tensors differ, the first is {first}: "
            f"{_difference(expected[first], got[first])}; all: {differing}"
        )


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    for (name, expected), got in zip(one.named_parameters(), other.parameters(), strict=True):
        assert has_same_bits(expected.detach(), got.detach()), name


def _difference(expected: Tensor, got: Tensor) -> str:
    if expected.dtype != got.dtype or expected.shape != got.shape:
        return (
            f"got {got.dtype} of shape {tuple(got.shape)}, expected {expected.dtype} of shape {tuple(expected.shape)}"
        )
    distance = (expected.double() - got.double()).abs().max().item()
    return f"maximum absolute difference {distance:.3e}"
