"""Measure the absolute peak of a training step: everything that model, optimizer and step hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from recollect._torch_parallel import GradientBuckets
from recollect.measuring.meter import measure_peak, storage_bytes

_Result = TypeVar("_Result")


def resident_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of parameters, gradients, buffers, optimizer state and buckets in which gradients are reduced.

    Shared storages count once. Gradients that are parts of buckets must not be there.
    """
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    tensors += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    tensors += [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return storage_bytes(tensors) + sum(GradientBuckets(model, may_communicate=False).sizes_bytes)


def measure_step(
    step: Callable[[], _Result], *, device: torch.device, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[_Result, int]:
    """Run `step` and return its result and the peak in bytes of everything alive during it.

    On CUDA this reads the allocator's counter and costs nothing. Elsewhere a meter measures the growth over what model and
    optimizer held before, which slows the step down.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        result = step()
        return result, torch.cuda.max_memory_allocated(device)
    measurement = measure_peak(step, device=device, baseline_bytes=resident_bytes(model, optimizer))
    return measurement.result, measurement.peak_bytes
