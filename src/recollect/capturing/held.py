"""What a captured step reads and writes at fixed addresses: a copy of the batch, the model's tensors, and gradients."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from recollect._torch_private import tree_flatten, tree_map
from recollect.errors import ArgumentError, ConfigError
from recollect.recording.model_step import describe_batch
from recollect.tensors import tensors_in


class StaticBatch:
    """A copy of a batch, for the graph to read; other batches of the same kind are copied into it.

    It is on the device of the step: code that reads a tensor on the host would read this one, and only while it is captured.
    """

    def __init__(self, batch: Any, device: torch.device) -> None:
        if any(tensor.requires_grad for tensor in tensors_in(batch)):
            raise ConfigError(
                settings={"batch": describe_batch(batch)},
                reason="one of its tensors requires grad, and a captured step returns no gradients of its batch",
                advice="Detach it, or run the step without recollect.capture.",
            )
        self.batch = tree_map(
            lambda leaf: leaf.to(device, copy=True) if isinstance(leaf, torch.Tensor) else leaf, batch
        )
        self._tensors = tensors_in(self.batch)

    def fill(self, batch: Any) -> None:
        for own, given in zip(self._tensors, tensors_in(batch), strict=True):
            own.copy_(given, non_blocking=True)


def kind_of(batch: Any) -> Hashable:
    """Return what a graph fixes of a batch: all but what its tensors hold, and where they are."""
    leaves, structure = tree_flatten(batch)
    try:
        kind = (
            str(structure),
            tuple(
                (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else (type(leaf), leaf) for leaf in leaves
            ),
        )
        hash(kind)
    except TypeError:
        raise ArgumentError(
            f"step(batch): got {describe_batch(batch)}, in which something is neither a tensor nor hashable; expected tensors, "
            "numbers and texts, which a captured step can tell apart."
        ) from None
    return kind


class ModelState:
    """What a graph of a model's step has fixed of the model: the addresses of its tensors, and its switches."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        tables = [table for module in self._modules for table in (module._parameters, module._buffers)]
        self._slots = [(table, name) for table in tables for name, tensor in table.items() if tensor is not None]
        self._addresses = self._now()

    def _now(self) -> list[int]:
        return [-1 if (tensor := table.get(name)) is None else tensor.data_ptr() for table, name in self._slots]

    @property
    def switches(self) -> Hashable:
        """Which modules train, which parameters do, and what autocast says: each combination has a graph of its own."""
        return (
            tuple(module.training for module in self._modules),
            tuple(tensor.requires_grad for table, name in self._slots if (tensor := table.get(name)) is not None),
            tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
        )

    def check(self) -> None:
        """Check that the model's tensors are where the graph reads them."""
        now = self._now()
        if now == self._addresses:
            return
        moved = next(name for (_, name), old, new in zip(self._slots, self._addresses, now, strict=True) if old != new)
        raise ConfigError(
            settings={"recollect.capture": "captured"},
            reason=f"{moved!r} of the model has moved since: the graph would still use its old memory",
            advice="Call remove() and capture the step again; or load weights with assign=False, which copies them.",
        )
