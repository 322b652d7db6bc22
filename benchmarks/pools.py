"""Compare predicted pools of CUDA graphs with pools played from what a real step makes and frees, and with peaks.

    python benchmarks/pools.py

Bytes only: it does not matter what else runs. What came out: docs/cuda_graphs.md.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import recollect
from flags import MachineFlags, parse
from recollect.errors import BudgetTooSmallError
from recollect.lab.models.architectures import llama_config
from recollect.lab.models.gpt import GPTModel
from recollect.measuring.deaths import Deaths
from recollect.measuring.meter import traced
from recollect.planning.planners import planner_for
from recollect.simulation.pool import played, pool_bytes
from tables import markdown

_STEP_PERCENT = 4
_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Flags(MachineFlags):
    """Sizes."""

    num_layers: int = 4
    """Layers of the models that run."""
    hidden_size: int = 256
    """Their width."""
    seq_length: int = 256
    """Tokens of each of their four sequences."""


def models(flags: Flags) -> dict[str, Callable[[], nn.Module]]:
    """Return how to make each model."""
    import transformers as hf

    layers, width, vocabulary = flags.num_layers, flags.hidden_size, 1000
    heads: dict[str, Any] = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": 4}
    plain: dict[str, Any] = {"use_cache": False, "vocab_size": vocabulary}
    return {
        "GPTModel": lambda: GPTModel(
            llama_config(num_layers=layers, hidden_size=width, num_attention_heads=4, vocab_size=vocabulary)
        ),
        "GPT-2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=layers, n_embd=width, n_head=4, **plain)),
        "BERT": lambda: hf.BertForMaskedLM(hf.BertConfig(intermediate_size=4 * width, vocab_size=vocabulary, **heads)),
        "Llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(intermediate_size=3 * width, **heads, **plain)),
    }


def played_bytes(model: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """Return the pool of the third step under the plan that is applied."""
    for _ in range(3):
        model.zero_grad()
        gc.collect()
        with traced("a step", Deaths(())) as events:
            loss = model(**batch).loss
            loss.backward()
            del loss
    model.zero_grad()
    return played(events)


def plans(profile: recollect.Profile) -> Iterator[recollect.Plan]:
    """Yield the two plans that are known without a planner, and those for smaller and smaller budgets."""
    yield recollect.classic_plan(profile, "keep_all")
    yield recollect.classic_plan(profile, "full")
    planner = planner_for(profile)
    for percent in range(100, 0, -_STEP_PERCENT):
        try:
            yield planner.plan(f"{percent}%")
        except BudgetTooSmallError:
            return


def real_rows(flags: Flags) -> Iterator[tuple[str, ...]]:
    """Compare pools for each model."""
    tokens = torch.randint(0, 1000, (4, flags.seq_length))
    for name, make in models(flags).items():
        torch.manual_seed(0)
        model = make().train()
        batch = {"tokens" if name == "GPTModel" else "input_ids": tokens, "labels": tokens}
        profile = recollect.record(model, batch, gradients="freed", holds_output=False).for_capture()
        off = []
        for plan in plans(profile):
            with recollect.apply(model, plan):
                off.append(pool_bytes((profile, plan)) / played_bytes(model, batch) - 1)
        worst = max(off, key=abs)
        yield name, str(len(off)), str(off.count(0)), f"{100 * worst:+.1f} %"


def gap_rows() -> Iterator[tuple[str, ...]]:
    """Show pools beside peaks for a model of 1B parameters, on fake tensors."""
    with torch.device("meta"):
        config = llama_config(num_layers=16, hidden_size=2048, num_attention_heads=16, vocab_size=32_000)
        model = GPTModel(config).to(torch.bfloat16)
    tokens = torch.zeros(1, 4096, dtype=torch.int64, device="meta")
    batch = {"tokens": tokens, "labels": tokens}
    profile = recollect.record(model, batch, fake=True, hardware="H100", gradients="freed", holds_output=False)
    full = recollect.classic_plan(profile, "full")
    found = {
        "everything kept": recollect.classic_plan(profile, "keep_all"),
        "full recompute": full,
        "a plan at its peak": recollect.plan(profile, full.predicted_peak_bytes or 0),
    }
    for name, plan in found.items():
        peak_bytes, pool = (plan.predicted_peak_bytes or 0) - profile.persistent_bytes, pool_bytes((profile, plan))
        yield name, f"{peak_bytes / _GIB:.2f}", f"{pool / _GIB:.2f}", f"{(pool - peak_bytes) / _GIB:.2f}"


def main(flags: Flags) -> None:
    """Print both tables."""
    warnings.simplefilter("ignore")
    print(markdown(list(real_rows(flags)), ("model", "plans", "equal to the byte", "the worst")))
    print()
    print(markdown(list(gap_rows()), ("1B, 4096 tokens", "peak GiB", "pool GiB", "gaps GiB")))


if __name__ == "__main__":
    main(parse(Flags, __doc__))
