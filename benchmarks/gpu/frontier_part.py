"""`benchmarks/frontier.py` on the device: peers and plans at equal peak, in turns, medians of ratios."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import get_args

from frontier import Flags, run_model
from gpu.part import Context
from models import ModelName
from subject import StepFlags

# A round of all contestants of the 7B model takes a minute: those that people would choose.
_FEW_PEERS = ("full", "every 2nd layer", "SAC attention", "SAC matmuls", "torchtitan SAC", "Megatron mlp")
_FEW_PEERS += ("Megatron layernorm", "Megatron mlp+layernorm")


def sizes(context: Context, model: str) -> StepFlags:
    """Return about 1B parameters (MoE and MLA: as wide, fewer layers), or Llama of 7B at batch 1."""
    found = context.large_step(num_layers=16 if model == "dense" else 8)
    if model == "7b":
        # Weights, gradients, the gradients to compare with and, while it is recorded, gradients once more: 54 GB.
        found = replace(found, hidden_size=4096, num_layers=32, num_heads=32, seq_length=2048)
    if context.is_dry_run:
        tiny = {"hidden_size": 32, "num_layers": 4, "num_heads": 0, "vocab_size": 64, "seq_length": 32, "threads": 1}
        found = replace(found, **tiny)
    return found


def run(context: Context, *, model: str) -> str:
    """Run one model; peaks are written before the race, times after it."""
    name: ModelName = "dense" if model == "7b" else next(name for name in get_args(ModelName) if name == model)
    few = _FEW_PEERS[:2] if context.is_dry_run else _FEW_PEERS if model == "7b" else ()
    flags = Flags(
        step=sizes(context, model),
        minutes=0.0 if context.is_dry_run else context.share(150.0) / 60,
        least_rounds=1 if context.is_dry_run else 3,
        num_budgets=1 if context.is_dry_run or few else 4,
        peers=few,
        out=context.out,
    )
    found = run_model(flags, name, context.console, context.rows(**asdict(flags.step), model=name))
    ahead, level, behind = found.standing()
    over = f", {found.num_over_budget} plans over budget" if found.num_over_budget else ""
    failed = sum(match.contestant is None for match in found.matches)
    return (
        f"at equal peak ahead of {ahead} peers, level with {level}, behind {behind}{over}; {failed} peers failed; "
        f"{found.race.num_rounds} rounds"
    )
