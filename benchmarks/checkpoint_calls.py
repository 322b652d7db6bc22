"""Calls of `checkpoint`, ours against PyTorch's: what is held after forward, the peak of the step, and its CPU time.

    python benchmarks/checkpoint_calls.py            # a minute, one core

Layers with dropout, each called through `checkpoint`, in turns. Bytes are without the model, input and gradients.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import recollect

_PRODUCTS = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default, torch.ops.aten.bmm.default)


class Block(nn.Module):
    """A layer with a gate, as today's models have them, and dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attend_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attend = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend, then transform each token."""
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, -1, 32).transpose(1, 2) for part in self.attend(self.attend_norm(x)).chunk(3, -1)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + nn.functional.dropout(self.out(attended.transpose(1, 2).reshape(batch, length, width)), 0.1)
        hidden = self.norm(x)
        return x + nn.functional.dropout(self.down(nn.functional.silu(self.gate(hidden)) * self.up(hidden)), 0.1)


def contestants() -> dict[str, Callable[..., Any]]:
    """Return the ways to call a layer."""
    saves = functools.partial(create_selective_checkpoint_contexts, list(_PRODUCTS))
    return {
        "no recompute": lambda layer, x: layer(x),
        "PyTorch's": functools.partial(checkpoint, use_reentrant=False),
        "PyTorch's, reentrant": functools.partial(checkpoint, use_reentrant=True),
        "ours": recollect.checkpoint,
        "PyTorch's, saves products": functools.partial(checkpoint, use_reentrant=False, context_fn=saves),
        "ours, saves products": functools.partial(recollect.checkpoint, context_fn=saves),
    }


def main() -> None:
    """Measure, and print a table for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--sizes", nargs="+", default=["32x16", "256x512"], help="width x tokens")
    options = parser.parse_args()
    for size in options.sizes:
        width, length = map(int, size.split("x"))
        _measure(width, length, options.layers, options.rounds)


def _measure(width: int, length: int, num_layers: int, num_rounds: int) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(Block(width) for _ in range(num_layers))
    x = torch.randn(2, length, width, requires_grad=True)

    def forward(call: Callable[..., Any]) -> torch.Tensor:
        torch.manual_seed(1)
        hidden = x * 1
        for layer in layers:
            hidden = call(layer, hidden)
        return hidden.square().mean()

    def step(call: Callable[..., Any]) -> None:
        forward(call).backward()

    step(contestants()["no recompute"])  # From here on there are gradients.
    expected: list[torch.Tensor] = []
    bytes_of = {}
    for name, call in contestants().items():
        for tensor in (x, *layers.parameters()):
            tensor.grad.zero_()
        peak = recollect.measure_peak(functools.partial(step, call), device="cpu", baseline_bytes=0).peak_bytes
        gradients = [tensor.grad.clone() for tensor in (x, *layers.parameters())]
        expected = expected or gradients
        assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True)), name
        held = recollect.measure_peak(functools.partial(forward, call), device="cpu", baseline_bytes=0).end_bytes
        bytes_of[name] = (held, peak)
        del gradients
    times: dict[str, list[float]] = {name: [] for name in bytes_of}
    for _ in range(num_rounds):
        for name, call in contestants().items():
            begin = time.process_time()
            step(call)
            times[name].append(time.process_time() - begin)
    base = times["PyTorch's"]
    print(
        f"\n{num_layers} layers, width {width}, 2 x {length} tokens, {num_rounds} rounds, {torch.get_num_threads()} threads\n"
    )
    print("| | held, MiB | peak, MiB | CPU ms | to PyTorch's (quartiles) |\n|---|--:|--:|--:|--:|")
    for name, (held, peak) in bytes_of.items():
        ratios = [mine / theirs for mine, theirs in zip(times[name], base, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        shown = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        print(
            f"| {name} | {held / 2**20:.2f} | {peak / 2**20:.2f} | {1000 * statistics.median(times[name]):.1f} | {shown} |"
        )


if __name__ == "__main__":
    main()
