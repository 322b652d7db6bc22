"""The training step that the contestants run: the reference Llama on random tokens, forward, loss and backward."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

import recollect
from recollect.models.llama import Llama, LlamaConfig
from recollect.profile.find_units import find_units
from recollect.profile.meter import storage_bytes


@dataclass(frozen=True, kw_only=True)
class StepFlags:
    """Sizes of the step, and where it runs."""

    hidden_size: int = 512
    """Width of the residual stream."""
    num_layers: int = 8
    """Number of decoder layers."""
    num_heads: int = 0
    """Attention heads; 0: one for each 64 channels."""
    vocab_size: int = 1024
    """Number of token ids."""
    batch_size: int = 2
    """Sequences in the batch."""
    seq_length: int = 512
    """Tokens in a sequence."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of activations and matrix products; weights are fp32, as in training."""
    device: str = "cpu"
    """A torch device."""
    threads: int = 2
    """Threads of PyTorch on the CPU."""
    seed: int = 0
    """Of weights, tokens, and the order of contestants."""

    def __str__(self) -> str:
        sizes = f"d={self.hidden_size}, {self.num_layers} layers, {self.batch_size} x {self.seq_length} tokens"
        return f"{sizes}, vocabulary {self.vocab_size}, {self.dtype}"


class Step:
    """One model, one batch, and the step on them. It runs whatever recompute is on the model at the time.

    Attributes:
        layers: the repeated layers, by module path.
        resident_bytes: parameters, buffers and batch, which are alive in every step.
    """

    def __init__(self, flags: StepFlags) -> None:
        torch.set_num_threads(flags.threads)
        torch.manual_seed(flags.seed)
        self.flags = flags
        self.device = torch.device(flags.device)
        heads = flags.num_heads or max(1, flags.hidden_size // 64)
        dimensions = LlamaConfig(
            vocab_size=flags.vocab_size,
            hidden_size=flags.hidden_size,
            num_layers=flags.num_layers,
            num_heads=heads,
        )
        with self.device:
            self.model = Llama(dimensions, compute_dtype=torch.bfloat16 if flags.dtype == "bf16" else None)
            tokens = torch.randint(flags.vocab_size, (flags.batch_size, flags.seq_length + 1))
        self.batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
        self.layers: dict[str, nn.Module] = {unit.path: unit.module for unit in find_units(self.model) if unit.is_layer}
        self.resident_bytes = storage_bytes([*self.model.parameters(), *self.model.buffers(), tokens])

    def run(self) -> Tensor:
        """Forward, loss and backward; gradients are there afterwards."""
        loss: Tensor = self.model(**self.batch).loss
        loss.backward()
        return loss.detach()

    def clear(self) -> None:
        """Throw the gradients away."""
        for parameter in self.model.parameters():
            parameter.grad = None

    def seconds(self) -> float:
        """Run one step and time it."""
        self.clear()
        gc.collect()
        self._synchronize()
        begin = time.perf_counter()
        self.run()
        self._synchronize()
        return time.perf_counter() - begin

    def peak_bytes(self) -> int:
        """Run one step and measure its peak, what is resident counted, of the optimizer nothing."""
        self.clear()
        measured = recollect.measure_peak(self.run, device=self.device)
        self.clear()
        return self.resident_bytes + measured.peak_growth_bytes

    def gradients(self) -> dict[str, Tensor]:
        """Run one step and return the loss and all gradients, by name."""
        self.clear()
        loss = self.run()
        found = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        self.clear()
        return {"the loss": loss, **found}

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def first_difference(expected: dict[str, Tensor], got: dict[str, Tensor]) -> str | None:
    """Return the name of the first tensor whose bits differ, None if there is none."""
    for name in {**expected, **got}:
        if name not in got or name not in expected or not torch.equal(expected[name], got[name]):
            return name
    return None
