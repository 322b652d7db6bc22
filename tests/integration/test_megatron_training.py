"""Training with Megatron's settings on the reference models, dropout on: losses and final weights have the same bits."""

import csv
from pathlib import Path

import pytest

from forked_processes import run_forked

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODULES = {
    "gpt-tiny": ("core_attn", "mlp", "layernorm"),
    "llama-tiny": ("core_attn", "mlp", "layernorm"),
    "mixtral-tiny": ("core_attn", "moe", "moe_act", "layernorm"),
    "deepseek-v3-tiny": ("core_attn", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj", "layernorm"),
}


@pytest.mark.long
def test_training_is_the_same_to_the_bit(tmp_path: Path) -> None:
    """With AdamW, dropout and balancing of experts; results/training_losses.csv is of 300 steps."""
    num_steps = 6
    flags = ["--models", *MODULES, "--num-steps", str(num_steps), "--out", str(tmp_path)]
    done = run_forked(BENCHMARKS / "training_losses.py", *flags)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "training_losses.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for metric, expected in (("equal_losses", num_steps), ("equal_weights", 1)):
        found = {row["contestant"]: int(row["value"]) for row in rows if row["metric"] == metric}
        assert set(found.values()) == {expected}, found
        for name, modules in MODULES.items():
            # full twice, each module, all modules, and a budget
            assert sum(contestant.startswith(f"{name} / ") for contestant in found) == 2 + len(modules) + 1 + 1
