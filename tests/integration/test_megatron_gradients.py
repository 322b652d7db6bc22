"""Megatron's settings change no gradient: every granularity, method, number of layers and module set, dropout on."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

import recollect
from gradients import assert_same_gradients, gradients, step_of
from recollect.integrations.megatron import RecomputeConfig, TrainingSetting, megatron_plan
from recollect.lab.models.gpt import GPTModel
from recollect.lab.models.sizes import NAMED_CONFIGS
from recollect.profile.profile import Profile
from reference_cases import MODULES_OF_SIZE, REFERENCE_CASES
from tiers import long_but
from watch import Watch
from zoo import ZOO, Case

MODULES_OF = {
    **{f"{name} {core}": has for name, has in MODULES_OF_SIZE.items() for core in ("fused", "unfused")},
    "llama": ("core_attn", "mlp", "layernorm"),
    "gpt2": ("core_attn", "mlp", "layernorm"),
    "mixtral": ("core_attn", "moe", "moe_act", "layernorm"),
    "mixtral_eager": ("core_attn", "moe", "moe_act", "layernorm"),
    "deepseek_v3": ("core_attn", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj", "layernorm"),
}


def full(method: str, num_layers: int) -> dict[str, Any]:
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": num_layers}


def selective(modules: tuple[str, ...], **fields: Any) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": modules, **fields}


CASES = {**ZOO, **REFERENCE_CASES}


def settings_of(name: str) -> list[dict[str, Any]]:
    """One layer a region, all but one, all; each set of modules, and each module with its output dropped too."""
    modules, num_layers = MODULES_OF[name], len(CASES[name].layers)
    discarded = modules if not name.endswith(" fused") else ()
    return [
        *(full(method, n) for method in ("uniform", "block") for n in sorted({1, num_layers - 1, num_layers})),
        *(selective((module,)) for module in modules),
        selective(modules),
        *(selective((module,), recompute_discard_outputs=(module,)) for module in discarded),
        selective(modules, recompute_discard_outputs=()),
        selective(modules, recompute_discard_outputs=modules),
        {"moe_layer_recompute": True} if "moe" in modules else {},
    ]


# DeepSeek has all modules that the others have.
QUICK = ("gpt-tiny unfused", "deepseek-v3-tiny unfused", "llama", "deepseek_v3")
every_model = pytest.mark.parametrize("name", long_but(QUICK, MODULES_OF))


@functools.cache
def profile_of(name: str) -> Profile:
    case = CASES[name]
    return recollect.record(case.model(), case.data(), loss_fn=case.loss_fn)


@pytest.mark.filterwarnings("ignore:.*(deprecated|multi-token prediction layers):recollect.errors.ConfigWarning")
@every_model
def test_gradients_have_the_same_bits(name: str) -> None:
    case = CASES[name]
    model = case.model()
    expected = step_of(case, model)
    for fields in settings_of(name):
        with recollect.apply(model, megatron_plan(profile_of(name), RecomputeConfig(**fields))):
            assert_same_gradients(expected, step_of(case, model), str(fields))


def num_ops(case: Case, plan: recollect.Plan) -> int:
    model = case.model()
    with recollect.apply(model, plan), Watch() as watch:
        step_of(case, model)
    return watch.computing_ops().total()


# Without a kernel it is copies of queries and keys that are saved, and they belong to core_attn: what the projection
# returns is then saved by nobody.
SAVED_BY_NOBODY = {("deepseek_v3", "mla_up_proj")}


@every_model
def test_each_module_runs_ops_again(name: str) -> None:
    """Without this, a plan that drops nothing would pass the test above."""
    case, profile = CASES[name], profile_of(name)
    plain = num_ops(case, recollect.classic_plan(profile, "keep_all"))
    for module in MODULES_OF[name]:
        if (name, module) in SAVED_BY_NOBODY:
            continue
        discards = {} if name.endswith("unfused") else {"recompute_discard_outputs": (module,)}
        config = RecomputeConfig(**selective((module,), **discards))
        assert num_ops(case, megatron_plan(profile, config)) > plain, module


MTP = "deepseek-v3-tiny fused"


def test_layers_for_further_tokens_are_regions_of_uniform_whatever_the_number() -> None:
    for n in (1, 4):
        unit = megatron_plan(profile_of(MTP), RecomputeConfig(**full("uniform", n))).units["mtp.layers.0"]
        assert {action for name, action in unit.actions.items() if "linear_fc1" in name} == {"recompute"}
        assert unit.output == "keep"


def test_two_depths_are_counted_apart_from_the_decoder() -> None:
    """Each depth is a unit then; four layers are still four."""
    torch.manual_seed(0)
    config = replace(NAMED_CONFIGS["deepseek-v3-tiny"], mtp_num_layers=2)
    model, tokens = GPTModel(config), torch.randint(0, 256, (2, 12))
    batch = {"tokens": tokens, "labels": tokens}
    profile = recollect.record(model, batch)
    plan = megatron_plan(profile, RecomputeConfig(**full("uniform", 4)), TrainingSetting.of(config))
    assert [path for path, unit in plan.units.items() if unit.output == "recompute"] == [
        f"decoder.layers.{i}" for i in range(3)
    ]
    assert plan.units["mtp.layers.1"].recomputes_anything
    expected = gradients(model, batch, lambda output: output.loss)
    with recollect.apply(model, plan):
        assert_same_gradients(expected, gradients(model, batch, lambda output: output.loss))
