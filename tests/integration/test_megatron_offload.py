"""Megatron's settings for offload on real steps: gradients bit for bit, and the peak and host memory that were predicted."""

import functools
import gc
from typing import Any

import pytest
import torch

import recollect
from gradients import assert_same_gradients, step_of
from megatron_cases import FULL, offload, selective
from predictions import LEAN_LOOP, MOST_OVER_BYTES, larger
from recollect.engine.tape_forwards import UnitForward
from recollect.integrations.megatron import RecomputeConfig, megatron_plan
from recollect.measuring.meter import measure_peak
from recollect.profile.profile import Profile
from reference_cases import REFERENCE_CASES
from zoo import Case

SMALL: dict[str, Any] = {"min_offloaded_tensor_size": 600}
LAYERS: dict[str, Any] = {"cpu_offloading": True, "cpu_offloading_num_layers": 3}
ATTENTION = offload("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")
EXPERTS = offload("expert_fc1", "moe_act")
# Batches for which what a layer saves is 1 MiB and more, and others for which a step is quick.
SETTINGS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "whole layers": ("llama-tiny fused", 171, LAYERS),
    "whole layers and full": ("llama-tiny fused", 171, {**LAYERS, **FULL}),
    "whole layers and regions": ("llama-tiny fused", 171, {**LAYERS, **FULL, "recompute_num_layers": 2}),
    "whole layers and block": ("llama-tiny fused", 171, {**LAYERS, **FULL, "recompute_method": "block"}),
    "whole layers and modules": ("gpt-tiny fused", 171, {**LAYERS, **selective("mlp", "layernorm")}),
    "attention": ("gpt-tiny unfused", 8, {**ATTENTION, **SMALL}),
    "part of attention, few at a time": (
        "llama-tiny fused",
        8,
        {**ATTENTION, **SMALL, "activation_offload_fraction": 0.5, "fine_grained_offloading_max_inflight_offloads": 1},
    ),
    "attention and full": ("llama-tiny unfused", 8, {**ATTENTION, **SMALL, **FULL}),
    "experts": ("mixtral-tiny fused", 8, {**EXPERTS, **SMALL}),
    "experts and modules": ("deepseek-v3-tiny fused", 8, {**EXPERTS, **SMALL, **selective("core_attn", "layernorm")}),
}


def batch_of(case: Case, times: int) -> Any:
    return larger(case.data(), times)


@functools.cache
def profile_of(name: str, times: int) -> Profile:
    case = REFERENCE_CASES[name]
    return recollect.record(case.model(), batch_of(case, times), loss_fn=case.loss_fn, **LEAN_LOOP)


@pytest.mark.parametrize("setting", SETTINGS)
def test_steps_are_exact_and_as_large_as_predicted(setting: str) -> None:
    name, times, fields = SETTINGS[setting]
    case, profile = REFERENCE_CASES[name], profile_of(name, times)
    plan = megatron_plan(profile, RecomputeConfig(**fields))
    without = {key: value for key, value in fields.items() if "offload" not in key}
    kept = megatron_plan(profile, RecomputeConfig(**without))
    assert plan.predicted_peak_bytes <= kept.predicted_peak_bytes and plan.predicted_host_bytes
    model, batch = case.model(), batch_of(case, times)

    def backward() -> None:
        case.loss_fn(model(**batch)).backward()

    case = Case(case.name, case.model, lambda: batch, case.layers, case.loss_fn, is_random=case.is_random)
    expected = step_of(case, model)
    with recollect.apply(model, plan) as applied:
        (host,) = {f.tape.offload.host for f in applied._forwards if isinstance(f, UnitForward) and f.tape.offload}
        for _ in range(2):
            assert_same_gradients(expected, step_of(case, model))
        model.zero_grad()
        gc.collect()
        torch.manual_seed(0)
        measured_bytes = profile.persistent_bytes + measure_peak(backward, device="cpu").peak_growth_bytes
    assert abs(measured_bytes - plan.predicted_peak_bytes) <= MOST_OVER_BYTES
    assert (host.num_missed, host.pool.taken_bytes) == (0, 0)
    assert 0 < host.pool.most_taken_bytes <= plan.predicted_host_bytes
