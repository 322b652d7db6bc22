"""Megatron's settings change no gradient: every granularity, method, number of layers and module set, dropout on."""

from __future__ import annotations

import functools
from itertools import combinations
from typing import Any

import pytest

import recollect
from gradients import assert_same_gradients, step_of
from recollect.errors import ConfigError
from recollect.megatron import RecomputeConfig, megatron_plan
from recollect.profile.graph import Profile
from watch import Watch
from zoo import ZOO, Case

MODULES_OF = {
    "llama": ("core_attn", "mlp", "layernorm"),
    "gpt2": ("core_attn", "mlp", "layernorm"),
    "mixtral": ("core_attn", "moe", "moe_act", "layernorm"),
    "mixtral_eager": ("core_attn", "moe", "moe_act", "layernorm"),
    "deepseek_v3": ("core_attn", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj", "layernorm"),
}
EVERY_MODULE = ("core_attn", "mlp", "moe", "shared_experts", "layernorm", "moe_act", "mla_up_proj")
OTHERS = [(name, module) for name, has in MODULES_OF.items() for module in EVERY_MODULE if module not in has]


def module_sets(name: str) -> list[tuple[str, ...]]:
    """Each module, each pair, and all."""
    modules = MODULES_OF[name]
    return [*((module,) for module in modules), *combinations(modules, 2), modules]


def full(method: str, num_layers: int) -> dict[str, Any]:
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": num_layers}


def selective(modules: tuple[str, ...], **fields: Any) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": modules, **fields}


SETTINGS = [
    (name, fields)
    for name, modules in MODULES_OF.items()
    for fields in (
        *(full(method, n) for method in ("uniform", "block") for n in range(1, len(ZOO[name].layers) + 1)),
        *(selective(chosen) for chosen in module_sets(name)),
        *(selective((module,), recompute_discard_outputs=(module,)) for module in modules),
        selective(modules, recompute_discard_outputs=()),
        selective(modules, recompute_discard_outputs=modules),
        {"moe_layer_recompute": True} if "moe" in modules else {},
    )
]


def label(setting: tuple[str, dict[str, Any]]) -> str:
    name, fields = setting
    return " ".join([name, *(str(value) for value in fields.values())])


@functools.cache
def profile_of(name: str) -> Profile:
    case = ZOO[name]
    return recollect.record(case.model(), case.data())


@functools.cache
def step_without(name: str) -> dict[str, Any]:
    case = ZOO[name]
    return step_of(case, case.model())


@pytest.mark.filterwarnings("ignore:.*deprecated:recollect.errors.ConfigWarning")
@pytest.mark.parametrize("setting", SETTINGS, ids=label)
def test_gradients_have_the_same_bits(setting: tuple[str, dict[str, Any]]) -> None:
    name, fields = setting
    case, config = ZOO[name], RecomputeConfig(**fields)
    model = case.model()
    with recollect.apply(model, megatron_plan(profile_of(name), config)):
        assert_same_gradients(step_without(name), step_of(case, model))


def num_ops(case: Case, plan: recollect.Plan) -> int:
    model = case.model()
    with recollect.apply(model, plan), Watch() as watch:
        step_of(case, model)
    return watch.computing_ops().total()


@pytest.mark.parametrize(
    ("name", "module"), [(name, module) for name, modules in MODULES_OF.items() for module in modules]
)
def test_each_module_runs_ops_again(name: str, module: str) -> None:
    """Without this, a plan that drops nothing would pass the test above."""
    case, profile = ZOO[name], profile_of(name)
    plain = num_ops(case, recollect.classic_plan(profile, "keep_all"))
    discarding = RecomputeConfig(**selective((module,), recompute_discard_outputs=(module,)))
    assert num_ops(case, megatron_plan(profile, discarding)) > plain


@pytest.mark.parametrize(("name", "module"), OTHERS)
def test_modules_that_a_model_has_not(name: str, module: str) -> None:
    with pytest.raises(ConfigError, match=f"no layer of this model has {module}"):
        megatron_plan(profile_of(name), RecomputeConfig(**selective((module,))))
