"""Check that budgets are kept: predicted and measured peaks of unmodified Hugging Face models under shrinking budgets.

    python benchmarks/budgets.py

Bytes are exact on the CPU, so peaks are the same on every machine; slowdowns are predicted from op times measured here.
Budgets are fractions of the range of peaks, from full recompute (0 %) to no recompute (100 %).
"""

from __future__ import annotations

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import nn

import recollect
from recollect.byte_format import format_bytes

FRACTIONS = (0.75, 0.5, 0.25, 0.05)
TOKENS = (2, 256)
VOCABULARY = 1024


def models() -> dict[str, nn.Module]:
    """Mid-sized, randomly initialised models."""
    size = {"vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    gpt2 = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=256, n_layer=8, n_head=4, bos_token_id=0, eos_token_id=0
    )
    return {
        "Llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, **heads)),
        "GPT-2 (dropout)": transformers.GPT2LMHeadModel(gpt2),
        "Mixtral": transformers.MixtralForCausalLM(transformers.MixtralConfig(**size, **heads, num_local_experts=4)),
    }


def rows(name: str, model: nn.Module) -> list[tuple[str, ...]]:
    """Return the table's rows for one model."""
    tokens = torch.randint(0, VOCABULARY, TOKENS)
    batch = {"input_ids": tokens, "labels": tokens}
    profile = recollect.record(model.train(), batch)
    plain = recollect.classic_plan(profile, "keep_all").predicted_peak_bytes or 0
    full = recollect.classic_plan(profile, "full")
    least = full.predicted_peak_bytes or 0
    found = [(name, "full recompute", format_bytes(least), "", "", f"{full.predicted_slowdown:.1%}", "")]
    for fraction in FRACTIONS:
        plan = recollect.plan(profile, int(least + fraction * (plain - least)))
        report = recollect.verify(model, batch, plan)
        found.append(
            (
                f"{name}, plain {format_bytes(report.plain_peak_bytes or 0)}",
                f"{fraction:.0%}: {format_bytes(plan.budget_bytes or 0)}",
                format_bytes(plan.predicted_peak_bytes or 0),
                format_bytes(report.plan_peak_bytes),
                "equal" if report.equal else "DIFFERENT",
                f"{plan.predicted_slowdown:.1%}",
                "" if plan.bound_slowdown is None else f"{plan.bound_slowdown:.1%}",
            )
        )
    return found


def main() -> None:
    """Print the table as Markdown and on the terminal."""
    torch.manual_seed(0)
    header = ("model", "budget", "predicted peak", "measured peak", "gradients", "predicted slowdown", "no plan below")
    table = Table(*header)
    for name, model in models().items():
        for row in rows(name, model):
            table.add_row(*row)
            print("| " + " | ".join(row) + " |", flush=True)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
