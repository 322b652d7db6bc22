"""Train small models with dropout, with and without recompute, and check that losses and final weights have the same bits.

    python benchmarks/training_losses.py               # 300 steps each, about eight minutes on one core
    python benchmarks/training_losses.py --num-steps 20

The text is a random walk over tokens, which a model can learn: the loss falls. Every run starts from the same weights and the
same random state, and draws the same batches.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

import recollect
from flags import MachineFlags, RunFlags, parse
from recollect.integrations.megatron import RecomputeConfig, megatron_plan
from recollect.lab.models.gpt import GPTModel
from recollect.lab.models.sizes import NAMED_CONFIGS
from results_csv import Number, append
from tables import markdown

MODULES = {
    "gpt-tiny": ("core_attn", "mlp", "layernorm"),
    "llama-tiny": ("core_attn", "mlp", "layernorm"),
    "mixtral-tiny": ("core_attn", "moe", "moe_act", "layernorm"),
    "deepseek-v3-tiny": ("core_attn", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj", "layernorm"),
}


@dataclass(frozen=True, kw_only=True)
class Flags(MachineFlags, RunFlags):
    """What to train, and for how long."""

    threads: int = 1
    """PyTorch's threads."""
    models: tuple[str, ...] = tuple(MODULES)
    """Small models to train."""
    num_steps: int = 300
    """Optimizer steps per run."""
    batch_size: int = 2
    """Sequences in a batch."""
    seq_length: int = 32
    """Tokens per sequence."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The result of a training run.

    Attributes:
        losses: of all steps, as they are.
        weights: SHA-256 of all parameters and buffers at the end.
    """

    losses: tuple[float, ...]
    weights: str


def new_model(name: str) -> GPTModel:
    """Return the small model with dropout, unfused attention, and always the same weights."""
    torch.manual_seed(0)
    config = replace(NAMED_CONFIGS[name], hidden_dropout=0.1, attention_dropout=0.1, core_attention="unfused")
    return GPTModel(config).train()


def batches(flags: Flags, vocab_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Draw tokens and labels, each [batch, sequence], with steps of -1, 0 or 1 from token to token."""
    generator = torch.Generator().manual_seed(1)
    while True:
        moves = torch.randint(-1, 2, (flags.batch_size, flags.seq_length + 1), generator=generator)
        start = torch.randint(vocab_size, (flags.batch_size, 1), generator=generator)
        walk = (start + moves.cumsum(1)) % vocab_size
        yield walk[:, :-1].contiguous(), walk[:, 1:].contiguous()


def train(name: str, plan: recollect.Plan | None, flags: Flags) -> Run:
    """Train from the beginning, under a plan if there is one."""
    model = new_model(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    applied: AbstractContextManager[object] = nullcontext() if plan is None else recollect.apply(model, plan)
    losses = []
    with applied:
        torch.manual_seed(2)
        for (tokens, labels), _ in zip(batches(flags, model.config.vocab_size), range(flags.num_steps), strict=False):
            loss = model(tokens, labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.update_expert_bias()
            losses.append(loss.item())
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return Run(losses=tuple(losses), weights=digest.hexdigest())


def plans(name: str, flags: Flags) -> dict[str, recollect.Plan]:
    """Return the plans to train with: `full`, each module, all modules together, and one for a budget."""
    model = new_model(name)
    tokens, labels = next(batches(flags, model.config.vocab_size))
    profile = recollect.record(
        model, {"tokens": tokens, "labels": labels}, optimizer=torch.optim.AdamW(model.parameters())
    )
    full = {"recompute_granularity": "full", "recompute_num_layers": 2}
    configs = {f"full {method} 2": RecomputeConfig(**full, recompute_method=method) for method in ("uniform", "block")}
    for modules in [(module,) for module in MODULES[name]] + [MODULES[name]]:
        chosen = RecomputeConfig(recompute_granularity="selective", recompute_modules=modules)
        configs[f"selective {'+'.join(modules)}"] = chosen
    found = {what: megatron_plan(profile, config) for what, config in configs.items()}
    peaks = [recollect.classic_plan(profile, kind).predicted_peak_bytes or 0 for kind in ("keep_all", "full")]
    return {**found, "budget": recollect.plan(profile, sum(peaks) // 2)}


def main(flags: Flags) -> None:
    """Train, print the table, and append to results/training_losses.csv."""
    torch.set_num_threads(flags.threads)
    warnings.simplefilter("error", recollect.errors.PlanMismatchWarning)
    rows, numbers = [], []
    for name in flags.models:
        plain = train(name, None, flags)
        numbers += [Number(f"loss_{at}", "nat", f"{name} / none", plain.losses[at]) for at in (0, -1)]
        for what, plan in plans(name, flags).items():
            run = train(name, plan, flags)
            equal = sum(ours == theirs for ours, theirs in zip(run.losses, plain.losses, strict=True))
            same = run.weights == plain.weights
            numbers.append(Number("equal_losses", "1", f"{name} / {what}", equal))
            numbers.append(Number("equal_weights", "bool", f"{name} / {what}", int(same)))
            row = (name, what, f"{equal} of {flags.num_steps}", "equal" if same else "DIFFERENT")
            rows.append((*row, f"{plain.losses[0]:.3f}", f"{run.losses[-1]:.3f}"))
            print(" | ".join(rows[-1]), flush=True)
    print(markdown(rows, ("model", "recompute", "equal losses", "final weights", "first loss", "last loss")))
    config = {**asdict(flags), "models": list(flags.models), "out": flags.out.name}
    append(flags.out / "training_losses.csv", numbers, config)


if __name__ == "__main__":
    main(parse(Flags))
