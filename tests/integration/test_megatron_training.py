"""Megatron's settings on the reference models, dropout on: gradients, losses and final weights have the same bits."""

from __future__ import annotations

import csv
import functools
import subprocess
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

import recollect
from gradients import Step, assert_same_gradients, gradients
from recollect.integrations.megatron import RecomputeConfig, megatron_plan
from recollect.lab.models.gpt import GPTModel, GPTOutput
from recollect.lab.models.sizes import NAMED_CONFIGS
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile
from watch import Watch

pytestmark = pytest.mark.integration

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODULES = {
    "gpt-tiny": ("core_attn", "mlp", "layernorm"),
    "llama-tiny": ("core_attn", "mlp", "layernorm"),
    "mixtral-tiny": ("core_attn", "moe", "moe_act", "layernorm"),
    "deepseek-v3-tiny": ("core_attn", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj", "layernorm"),
}
CORES = ("fused", "unfused")


def model_of(name: str, core: str, num_layers: int = 4) -> GPTModel:
    torch.manual_seed(0)
    fields: dict[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "core_attention": core}
    return GPTModel(replace(NAMED_CONFIGS[name], num_layers=num_layers, **fields)).train()


def batch() -> dict[str, torch.Tensor]:
    drawn = torch.randint(256, (2, 13), generator=torch.Generator().manual_seed(1))
    return {"tokens": drawn[:, :-1].contiguous(), "labels": drawn[:, 1:].contiguous()}


def loss_of(output: GPTOutput) -> torch.Tensor:
    assert output.loss is not None
    return output.loss


@functools.cache
def profile_of(name: str, core: str) -> Profile:
    return recollect.record(model_of(name, core), batch())


@functools.cache
def step_without(name: str, core: str) -> Step:
    return gradients(model_of(name, core), batch(), loss_of)


def full(method: str, num_layers: int) -> dict[str, Any]:
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": num_layers}


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": modules}


SETTINGS = [
    (name, core, fields)
    for name, modules in MODULES.items()
    for core in CORES
    for fields in (
        *(full(method, n) for method in ("uniform", "block") for n in range(1, 5)),
        *(selective(*chosen) for size in (1, 2) for chosen in combinations(modules, size)),
        selective(*modules),
    )
]


def label(setting: Any) -> str:
    name, core, fields = setting
    return " ".join([name, core, *(str(value) for value in fields.values())])


@pytest.mark.filterwarnings("ignore:got mtp_num_layers=1, recompute_method='block'")
@pytest.mark.parametrize("setting", SETTINGS, ids=label)
def test_gradients_have_the_same_bits(setting: tuple[str, str, dict[str, Any]]) -> None:
    name, core, fields = setting
    model = model_of(name, core)
    with recollect.apply(model, megatron_plan(profile_of(name, core), RecomputeConfig(**fields))):
        assert_same_gradients(step_without(name, core), gradients(model, batch(), loss_of))


def num_ops(name: str, plan: Plan) -> int:
    model = model_of(name, "unfused")
    with recollect.apply(model, plan), Watch() as watch:
        gradients(model, batch(), loss_of)
    return watch.computing_ops().total()


@pytest.mark.parametrize(("name", "module"), [(name, one) for name, modules in MODULES.items() for one in modules])
def test_each_module_runs_ops_again(name: str, module: str) -> None:
    """A plan that drops nothing would pass the test above."""
    profile = profile_of(name, "unfused")
    plain = num_ops(name, recollect.classic_plan(profile, "keep_all"))
    assert num_ops(name, megatron_plan(profile, RecomputeConfig(**selective(module)))) > plain


@pytest.mark.parametrize("name", MODULES)
def test_training_is_the_same_to_the_bit(name: str, tmp_path: Path) -> None:
    """With AdamW, dropout and balancing of experts; results/training_losses.csv is of 300 steps."""
    num_steps = 12
    flags = ["--models", name, "--num-steps", str(num_steps), "--out", str(tmp_path)]
    command = [sys.executable, str(BENCHMARKS / "training_losses.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "training_losses.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for metric, expected in (("equal_losses", num_steps), ("equal_weights", 1)):
        found = {row["contestant"]: int(row["value"]) for row in rows if row["metric"] == metric}
        assert set(found.values()) == {expected}, found
        assert len(found) == 2 + len(MODULES[name]) + 1 + 1  # full, each module, all modules, and a budget
