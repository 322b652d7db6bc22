"""What a training loop is here: a plain function, its data, and where the one line for recollect goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["LOOPS", "Attach", "Batch", "Batches", "Data", "Loop", "image_batches", "text_batches", "training_loop"]

Batch = dict[str, torch.Tensor]
Batches = Iterable[Batch]
Attach = Callable[[Any, Any], object]
"""Takes a model or several and an optimizer or several; called once, right before the loop."""
Data = Callable[[int], Batch]
"""Makes the batch of a step, the same one for the same number."""

VOCABULARY = 512
NUM_STEPS = 30


@dataclass(frozen=True)
class Loop:
    """A loop to run.

    Attributes:
        name: what the loop does that others do not.
        data: makes the batch of a step.
        num_batches: batches of a run.
        train: builds the models, trains them on the batches, and returns what it trained.
        steps_differ: later steps may need more than the first one: larger batches, gradients that are alive in forward.
    """

    name: str
    data: Data
    num_batches: int
    train: Callable[[Batches, Attach], list[nn.Module]]
    steps_differ: bool


LOOPS: dict[str, Loop] = {}


def training_loop(
    name: str, data: Data, num_batches: int = NUM_STEPS, *, steps_differ: bool = False
) -> Callable[[Callable[[Batches, Attach], list[nn.Module]]], Callable[[Batches, Attach], list[nn.Module]]]:
    """Enter a function as a loop."""

    def enter(train: Callable[[Batches, Attach], list[nn.Module]]) -> Callable[[Batches, Attach], list[nn.Module]]:
        LOOPS[name] = Loop(name, data, num_batches, train, steps_differ)
        return train

    return enter


def text_batches(
    sequences: int = 4, tokens: int = 64, shape_of: Callable[[int], tuple[int, int]] | None = None
) -> Data:
    """Return data of random tokens; `shape_of` gives sequences and tokens by the number of the step."""

    def batch(step: int) -> Batch:
        shape = (sequences, tokens) if shape_of is None else shape_of(step)
        ids = torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(step))
        return {"input_ids": ids, "labels": ids.clone()}

    return batch


def image_batches(images: int = 16, size: int = 16) -> Data:
    """Return data of random images with three channels."""

    def batch(step: int) -> Batch:
        generator = torch.Generator().manual_seed(step)
        return {"pixel_values": torch.randn(images, 3, size, size, generator=generator)}

    return batch
