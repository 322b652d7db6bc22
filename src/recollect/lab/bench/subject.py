"""The training step to measure: forward, loss and backward of each micro-batch, then the optimizer step; and its FLOPs."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import recollect
from recollect.costs.op_work import flops_of
from recollect.engine.op_mode import OpMode
from recollect.lab.train.optimizer_step import resident_bytes
from recollect.measuring.device_memory import empty_cache
from recollect.measuring.meter import PeakMeasurement, measure_peak, storage_bytes
from recollect.measuring.timing import timed
from recollect.profile.profile import Profile
from recollect.recording.model_step import run_forward


class FlopCount(OpMode):
    """Count FLOPs while active; PyTorch's `FlopCounterMode` misses attention on the CPU and counts causal attention as full.

    The FLOPs of compiled parts are not counted: they run compiled, as in training.

    Attributes:
        flops: FLOPs of all ops so far.

    Example:
        >>> import torch
        >>> with FlopCount() as count:
        ...     product = torch.ones(2, 3) @ torch.ones(3, 5)
        >>> count.flops
        60.0
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an op and count it."""
        output = func(*args, **(kwargs or {}))
        self.flops += flops_of(func, args, kwargs or {}, output)
        return output


@dataclass(eq=False, kw_only=True)
class Subject:
    """A model and its training step, run with whatever plan is applied to the model.

    Attributes:
        model: the model, in training mode, on its device.
        optimizer: over the model's parameters.
        batch: one micro-batch, as keywords of the model; all micro-batches of a step are the same.
        num_microbatches: micro-batches per step.
        num_tokens: tokens per micro-batch.
        device: the model's device.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: dict[str, Tensor]
    num_microbatches: int
    num_tokens: int
    device: torch.device

    def step(self) -> None:
        """Run one step; gradients are None before and after."""
        for _ in range(self.num_microbatches):
            loss = run_forward(self.model, self.batch, None)[1] / self.num_microbatches
            loss.backward()
            del loss
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def seconds(self) -> float:
        """Run one step and time it."""
        gc.collect()
        return timed(self.step, self.device)[1]

    def peak(self) -> PeakMeasurement[None]:
        """Run one step and measure its peak, including parameters, optimizer state and batch."""
        baseline_bytes = None  # CUDA's allocator counts everything
        empty_cache(self.device)
        if self.device.type != "cuda":
            baseline_bytes = resident_bytes(self.model, self.optimizer) + storage_bytes(self.batch.values())
        return measure_peak(self.step, device=self.device, baseline_bytes=baseline_bytes)

    def hardware_flops(self) -> float:
        """Run one step and count the FLOPs of its matrix products."""
        with (count := FlopCount()):
            self.step()
        return count.flops

    @torch.no_grad()
    def forward_flops(self) -> float:
        """Run a forward without gradients and return the FLOPs of all forwards of a step."""
        with (count := FlopCount()):
            self.model(**self.batch)
        return count.flops * self.num_microbatches

    def record(self) -> Profile:
        """Record the step for the planner."""
        return recollect.record(
            self.model,
            self.batch,
            optimizer=self.optimizer,
            holds_output=False,
            gradients="accumulated" if self.num_microbatches > 1 else "freed",
        )

    def clean_up(self) -> None:
        """Free what a step that ran out of memory left behind."""
        self.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        empty_cache(self.device)

    def describe(self) -> dict[str, Any]:
        """Describe the step, apart from the model's dimensions and the machine."""
        parameter = next(self.model.parameters())
        return {
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "micro_batch": ", ".join(f"{name} {list(t.shape)}" for name, t in self.batch.items()),
            "num_microbatches": self.num_microbatches,
            "optimizer": type(self.optimizer).__name__,
        }
