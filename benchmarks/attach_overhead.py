"""Measure what `attach` adds to a step once the plan is made: two equal models, one attached, one with the same plan applied.

    python benchmarks/attach_overhead.py        # about two minutes on one core

Steps of both take turns; the added time is the median of the differences within a turn, in processor time.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import nn

import recollect
from flags import RESULTS, parse
from results_csv import Number, append

_SIZES = {
    "6 layers of width 256": (dict(num_hidden_layers=6, hidden_size=256, intermediate_size=688), (4, 128)),
    "32 layers of width 64": (dict(num_hidden_layers=32, hidden_size=64, intermediate_size=172), (4, 128)),
}


@dataclass(frozen=True, kw_only=True)
class Flags:
    """How long."""

    turns: int = 60
    """Steps of each model."""
    out: Path = RESULTS
    """Folder of `attach_overhead.csv`."""


def main() -> None:
    """Print and append the numbers."""
    flags = parse(Flags, __doc__)
    torch.set_num_threads(1)
    numbers: list[Number] = []
    for name, (sizes, shape) in _SIZES.items():
        step_s, added_s = _measure(sizes, shape, flags.turns)
        print(f"{name}: {1e6 * added_s:.0f} us on top of {1e3 * step_s:.1f} ms, {added_s / step_s:.2%}")
        numbers += [Number("step_time", "s", name, step_s), Number("added_time", "s", name, added_s)]
    append(flags.out / "attach_overhead.csv", numbers, {"device": "cpu"})


def _measure(sizes: dict[str, int], shape: tuple[int, int], turns: int) -> tuple[float, float]:
    """Return the time of a step with the plan applied, and what `attach` adds to it, in seconds."""
    applied, attached = _model(sizes), _model(sizes)
    optimizers = {model: torch.optim.SGD(model.parameters(), lr=1e-4) for model in (applied, attached)}
    tokens = torch.randint(0, 64, shape)

    def seconds(model: nn.Module) -> float:
        start_s = time.process_time()
        out = model(input_ids=tokens, labels=tokens)
        out.loss.backward()
        optimizers[model].step()
        optimizers[model].zero_grad()
        return time.process_time() - start_s

    handle = recollect.attach(attached, optimizers[attached], "80%", log=lambda line: None)
    seconds(attached)
    assert handle.plan is not None
    recollect.apply(applied, handle.plan)
    pairs = [(seconds(applied), seconds(attached)) for _ in range(turns + 5)][5:]
    return statistics.median(one for one, _ in pairs), statistics.median(other - one for one, other in pairs)


def _model(sizes: dict[str, int]) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(num_attention_heads=4, vocab_size=64, **sizes)
    return transformers.LlamaForCausalLM(config).train()


if __name__ == "__main__":
    main()
