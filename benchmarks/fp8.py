"""What products in 8 bits save of memory, and what they do to a short training: docs/fp8.md has the output.

    python benchmarks/fp8.py memory    ten minutes
    python benchmarks/fp8.py losses    five minutes

Memory: bf16, torchao's emulated float8, and the recipes of `recollect.lab.models.fp8`, in a dense model and in a mixture of
experts, whose weights are bf16. Saved: the storages that autograd saves in forward, without parameters, and how much of it is
casts of weights. Peaks: predicted, and measured by `verify`: of the plain step, of the one that recomputes whole layers, and
of the plan with the least peak. Products are emulated in fp32 on a CPU, so that nothing here says anything about time.

Losses: of bytes of README.md, in the last tenth of the steps, by recipe and seed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor

import recollect
from flags import parse
from recollect.errors import BudgetTooSmallError
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.gpt import GPTModel
from recollect.lab.models.linear import Linear
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile

MIB = 2**20
Batch = tuple[Tensor, Tensor]
RECIPES: dict[str, dict[str, Any]] = {
    "delayed": {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 16, "fp8_amax_compute_algo": "max"},
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
}
SIZES: dict[str, dict[str, Any]] = {
    "dense": {"ffn_hidden_size": 512},
    "experts": {
        **{"num_moe_experts": 4, "moe_ffn_hidden_size": 256, "moe_grouped_gemm": True},
        **{"gated_linear_unit": True, "activation_func": "silu"},
    },
}


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What to measure."""

    part: tyro.conf.Positional[Literal["memory", "losses"]]
    """Which table."""
    kinds: tuple[Literal["dense", "experts"], ...] = ("dense", "experts")
    """Models."""
    batch_size: int = 8
    """Sequences of 128 tokens."""
    steps: int = 60
    """Of each training."""
    seeds: int = 3
    """Trainings of each recipe."""


def config_of(kind: str, recipe: str, **changes: Any) -> TransformerConfig:
    """Return a model without dropout: rotary positions, four layers, 128 channels."""
    sizes = {"num_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "vocab_size": 256, **SIZES[kind]}
    parts = {
        "position_embedding_type": "rope",
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return TransformerConfig(**{**sizes, **parts, **RECIPES.get(recipe, {}), **changes})


def with_torchao(model: GPTModel) -> GPTModel:
    """Convert the linear layers, not the LM head; experts are no linear layers to torchao, and stay as they are."""
    logging.disable(logging.WARNING)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
    convert_to_float8_training(
        model.decoder.layers, config=config, module_filter_fn=lambda module, name: isinstance(module, Linear)
    )
    return model


def saved_bytes(model: GPTModel, batch: Batch) -> int:
    """Return the bytes of the storages that autograd saves, but for parameters."""
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(*batch)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(tensor.untyped_storage().nbytes() for place, tensor in found.items() if place not in own)


def loss(output: Any) -> Tensor:
    """Return the loss of an output."""
    found: Tensor = output.loss
    return found


def cast_weight_bytes(model: GPTModel) -> int:
    """Return the bytes of the casts of all weights that are multiplied in 8 bits."""
    layers = [module for module in model.modules() if getattr(module, "fp8", None) is not None]
    return sum(layer.get_parameter("weight").numel() for layer in layers)


def least_plan(profile: Profile) -> Plan:
    """Return the plan of the least peak."""
    try:
        return recollect.plan(profile, 1)
    except BudgetTooSmallError as refused:
        return recollect.plan(profile, refused.least_peak_bytes)


def memory(flags: Flags) -> Iterator[Table]:
    """Yield a table for each kind of model."""
    tokens = torch.randint(256, (flags.batch_size, 129), generator=torch.Generator().manual_seed(0))
    batch = (tokens[:, :-1], tokens[:, 1:])
    for kind in flags.kinds:
        table = Table(title=f"{kind}, MiB", title_justify="left")
        peaks_of = (word for name in ("step", "whole layers", "least") for word in (name, "measured"))
        for name in ("", "saved", "of it weights", *peaks_of):
            table.add_column(name, justify="right" if name else "left")
        for recipe in ("bf16", "torchao", *RECIPES):
            torch.manual_seed(0)
            model = GPTModel(config_of(kind, recipe)).bfloat16()
            if recipe == "torchao":
                model = with_torchao(model)
            saved = [saved_bytes(model, batch), cast_weight_bytes(model)]
            profile = recollect.record(model, batch, loss_fn=loss)
            peaks = [recollect.plan(profile, "100%").predicted_peak_bytes or 0]
            for plan in (recollect.classic_plan(profile, "full"), least_plan(profile)):
                report = recollect.verify(model, batch, plan, loss_fn=loss)
                peaks += [plan.predicted_peak_bytes or 0, report.plan_peak_bytes]
            peaks.insert(1, report.plain_peak_bytes or 0)
            table.add_row(recipe, *(f"{size / MIB:.2f}" for size in (*saved, *peaks)))
        yield table


def losses(flags: Flags) -> Iterator[Table]:
    """Yield a table for each kind of model."""
    text = torch.frombuffer(bytearray(Path("README.md").read_bytes()), dtype=torch.uint8).long()
    for kind in flags.kinds:
        table = Table(title=f"{kind}: loss", title_justify="left")
        for name in ("", *(f"seed {seed}" for seed in range(flags.seeds)), "mean, less bf16's"):
            table.add_column(name, justify="right" if name else "left")
        plain = 0.0
        for recipe in ("bf16", *RECIPES):
            found = [trained(kind, recipe, text, seed, flags.steps) for seed in range(flags.seeds)]
            mean = sum(found) / len(found)
            plain = plain or mean
            table.add_row(recipe, *(f"{one:.4f}" for one in found), f"{mean - plain:+.4f}")
        yield table


def trained(kind: str, recipe: str, text: Tensor, seed: int, steps: int) -> float:
    """Train two layers on eight sequences of 64 bytes a step, with bf16 activations and fp32 weights."""
    torch.manual_seed(seed)
    model = GPTModel(config_of(kind, recipe, num_layers=2), compute_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    last = []
    for _ in range(steps):
        starts = torch.randint(len(text) - 65, (8,))
        tokens = torch.stack([text[start : start + 65] for start in starts])
        lm_loss = model(tokens[:, :-1], labels=tokens[:, 1:]).lm_loss
        lm_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        last.append(lm_loss.item())
    last = last[-max(1, steps // 10) :]
    return sum(last) / len(last)


def main(flags: Flags) -> None:
    """Print the tables."""
    console = Console(width=110)
    for table in {"memory": memory, "losses": losses}[flags.part](flags):
        console.print(table)


if __name__ == "__main__":
    main(parse(Flags))
