"""The training step of the benchmarks, on random tokens: forward, loss, and backward into existing gradients.

Gradients are there before the step begins, as in gradient accumulation, and zeroed between steps. So what a step adds to
memory is activations and working memory, and nothing else: that is what recompute is about.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

import recollect
from flags import MachineFlags
from models import ModelName, build, model_inputs
from recollect.measuring.device_memory import empty_cache
from recollect.measuring.meter import storage_bytes
from recollect.measuring.timing import timed_work, wait_for
from recollect.recording.find_units import find_units


@dataclass(frozen=True, kw_only=True)
class StepFlags(MachineFlags):
    """Sizes of the step, and its machine."""

    hidden_size: int = 384
    """Width of the residual stream."""
    num_layers: int = 8
    """Number of decoder layers."""
    num_heads: int = 0
    """Attention heads; 0: one per 64 channels."""
    vocab_size: int = 1024
    """Size of the vocabulary."""
    batch_size: int = 2
    """Sequences in the batch."""
    seq_length: int = 512
    """Tokens per sequence."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of activations and matrix products; weights are fp32 in the reference Llama, of this dtype in the others."""
    seed: int = 0
    """Seed of weights, tokens and the order of contestants."""

    def __str__(self) -> str:
        sizes = f"d={self.hidden_size}, {self.num_layers} layers, {self.batch_size} x {self.seq_length} tokens"
        return f"{sizes}, vocabulary {self.vocab_size}, {self.dtype}"


class Step:
    """A model, a batch, and the step on them, run with whatever recompute is active on the model.

    Attributes:
        layers: the repeated layers, by module path.
        resident_bytes: parameters, buffers, gradients and batch, which are alive in every step.
    """

    def __init__(self, flags: StepFlags, model: ModelName = "reference") -> None:
        torch.set_num_threads(flags.threads)
        torch.manual_seed(flags.seed)
        self.flags = flags
        self.model_name = model
        self.device = torch.device(flags.device)
        with self.device:
            self.model = build(
                model,
                hidden_size=flags.hidden_size,
                num_layers=flags.num_layers,
                num_heads=flags.num_heads,
                vocab_size=flags.vocab_size,
            )
            tokens = torch.randint(flags.vocab_size, (flags.batch_size, flags.seq_length + 1))
        if flags.dtype == "bf16":
            _to_bf16(self.model)
        self.batch = model_inputs(model, tokens)
        self.layers: dict[str, nn.Module] = {unit.path: unit.module for unit in find_units(self.model) if unit.is_layer}
        self.clear()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        resident = [*self.model.parameters(), *self.model.buffers(), *gradients, *self.batch.values()]
        self.resident_bytes = storage_bytes(resident)

    def run(self) -> Tensor:
        """Run forward, loss and backward, and accumulate gradients."""
        loss: Tensor = self.model(**self.batch).loss
        loss.backward()
        return loss.detach()

    def clear(self) -> None:
        """Set gradients to zero, in place if they exist."""
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()

    def seconds(self) -> float:
        """Run one step and time it."""
        self.clear()
        gc.collect()
        return timed_work(self.run, self.device)[1]

    def launched_s(self) -> float:
        """Run one step, and return the seconds until all of it was launched (on a CPU: completed)."""
        wait_for(self.device)
        begin = time.perf_counter()
        self.run()
        launched_s = time.perf_counter() - begin
        wait_for(self.device)
        return launched_s

    def peak_bytes(self) -> int:
        """Run one step and measure its peak, including resident memory but no optimizer state.

        On CUDA without what others left in the allocator's cache: a block of theirs that is too large counts whole.
        """
        self.clear()
        empty_cache(self.device)
        return self.resident_bytes + recollect.measure_peak(self.run, device=self.device).peak_growth_bytes

    def gradients(self, *, copied: bool = True) -> dict[str, Tensor]:
        """Run one step and return the loss and all gradients by name; unless `copied`, they are valid until the next step."""
        self.clear()
        loss = self.run()
        found = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        return {"the loss": loss, **({n: g.clone() for n, g in found.items()} if copied else found)}

    def record(self, engine: Literal["tape", "graph", "compile"] = "tape") -> recollect.Profile:
        """Record the step for recollect's planner.

        Peaks are predicted as `peak_bytes` measures them. On CUDA a profile also counts what else is on the device, such as
        the gradients that a benchmark compares with, and with it budgets that are measured peaks would be too small.
        """
        profile = recollect.record(self.model, self.batch, holds_output=False, gradients="accumulated", engine=engine)
        ours = {kind: nbytes for kind, nbytes in profile.persistent.items() if kind != "other_allocations"}
        return replace(profile, persistent=ours)


def _to_bf16(model: nn.Module) -> None:
    if hasattr(model, "compute_dtype"):
        model.compute_dtype = torch.bfloat16
    else:
        model.to(torch.bfloat16)


def first_difference(expected: dict[str, Tensor], got: dict[str, Tensor]) -> str | None:
    """Return the name of the first tensor whose bits differ; None if none does."""
    for name in {**expected, **got}:
        if name not in got or name not in expected or not torch.equal(expected[name], got[name]):
            return name
    return None


def largest_difference(expected: dict[str, Tensor], got: dict[str, Tensor]) -> float:
    """Return the largest difference of any tensor, relative to that tensor's largest entry."""
    return max(
        (
            float((got[name] - tensor).abs().max() / tensor.abs().max().clamp_min(1e-30))
            for name, tensor in expected.items()
        ),
        default=0.0,
    )
