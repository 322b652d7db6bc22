"""Random plans that keep, recompute and offload, on real models: gradients bit for bit, peak and host memory as predicted."""

import functools
import gc
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import recollect
from gradients import Step, assert_same_gradients, call, gradients, loss_of, step_of
from megatron_cases import FULL, offload, selective
from offload_plans import random_offload_plan
from offload_programs import Sizes, carried_by, offload_of
from predictions import CASES, LEAN_LOOP, MOST_OVER_BYTES, larger
from recollect.engine.tape_forwards import UnitForward
from recollect.integrations.megatron import RecomputeConfig, megatron_plan
from recollect.measuring.meter import measure_peak
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from recollect.profile.profile import Profile
from recollect.simulation.decisions import decide
from recollect.simulation.peak_sums import PeakSums
from recollect.simulation.program import Program
from recollect.simulation.simulate import simulate
from recollect.simulation.windows import edges, windows
from reference_cases import REFERENCE_CASES
from tiers import long_but
from zoo import Batch, Case

QUICK = ["reference_gpt", "mixtral", "bart", "resnet"]
# Of each model. All of them: 207 plans; with RECOLLECT_OFFLOAD_PLANS=44, a thousand.
SEEDS = range(int(os.environ.get("RECOLLECT_OFFLOAD_PLANS", "9")))
QUICK_SEEDS = SEEDS[:3]


class Trial:
    """A model, recorded, with its gradients without a plan."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model: nn.Module = case.model()
        self.batch: Batch = larger(case.data())
        self.profile: Profile = recollect.record(self.model, self.batch, loss_fn=case.loss_fn, **LEAN_LOOP)
        self.plain = self.step()

    def step(self) -> Step:
        found = gradients(self.model, self.batch, self.case.loss_fn)
        # Batch norm's statistics go on from step to step.
        return {name: tensor for name, tensor in found.items() if not name.startswith("buffer ")}

    def backward(self) -> None:
        loss_of(call(self.model, self.batch), self.case.loss_fn).backward()

    def peak_bytes(self) -> int:
        self.model.zero_grad()
        gc.collect()
        return self.profile.persistent_bytes + measure_peak(self.backward, device="cpu").peak_growth_bytes


@pytest.fixture(scope="module", params=long_but(QUICK, list(CASES)))
def trial(request: pytest.FixtureRequest) -> Iterator[Trial]:
    yield Trial(CASES[request.param])


@pytest.mark.parametrize("seed", long_but(QUICK_SEEDS, SEEDS))
def test_random_plans_are_exact(trial: Trial, seed: int) -> None:
    profile = trial.profile
    plan = random_offload_plan(profile, seed)
    simulation = simulate(profile, decide(profile, plan))
    assert simulation.host_bytes and not simulation.num_missed
    plan = replace(plan, predicted_host_bytes=simulation.host_bytes)
    with recollect.apply(trial.model, plan) as applied:
        offload = offload_of(applied)
        for _ in range(2):
            assert_same_gradients(trial.plain, trial.step())
        measured_bytes = trial.peak_bytes()
    assert abs(measured_bytes - simulation.peak_bytes) <= MOST_OVER_BYTES
    # Each value came and went as planned, and the host memory that was predicted was just enough.
    assert (offload.host.num_missed, offload.num_stayed, offload.host.pool.taken_bytes) == (0, 0, 0)
    assert [slab.slots.end_bytes for slab in offload.host.pool._slabs] == [simulation.host_bytes]


@pytest.mark.parametrize("seed", long_but(QUICK_SEEDS, SEEDS))
def test_sum_over_units_is_the_simulation(trial: Trial, seed: int) -> None:
    """An offloaded value is a kept one with a hole: the planner's quick sum says the same as playing each copy."""
    profile = trial.profile
    program = Program(profile, windows(profile), edges(profile))
    decisions = decide(profile, random_offload_plan(profile, 100 + seed))
    played, summed = simulate(profile, decisions, program=program), PeakSums(program).peaks(decisions)
    assert (played.peak_bytes, played.recompute_s) == (summed.peak_bytes, summed.recompute_s)
    assert played.window_peaks == summed.window_peaks


def test_is_exact_under_accumulation_kept_graphs_and_graphs_that_are_thrown_away() -> None:
    trial = Trial(CASES["reference"])
    plan = random_offload_plan(trial.profile, 3)

    def steps(times: int) -> list[torch.Tensor]:
        trial.model.zero_grad()
        for number in range(times):
            torch.manual_seed(number)
            loss = loss_of(call(trial.model, trial.batch), trial.case.loss_fn)
            loss_of(call(trial.model, trial.batch), trial.case.loss_fn)  # Nobody asks for its gradients.
            loss.backward(retain_graph=True)
            loss.backward()
        two = [loss_of(call(trial.model, trial.batch), trial.case.loss_fn) for _ in range(2)]
        for loss in reversed(two):
            loss.backward()
        return [p.grad.clone() for p in trial.model.parameters() if p.grad is not None]

    plain = steps(2)
    with recollect.apply(trial.model, plan) as applied:
        planned = steps(2)
        offload = offload_of(applied)
    assert all(map(torch.equal, plain, planned))
    gc.collect()
    assert offload.host.pool.taken_bytes == 0


def test_what_is_offloaded_is_what_was_predicted(trial: Trial) -> None:
    """Also of what cannot be recomputed: of results of unseen kernels, and of room for others to fill, neither is."""
    profile = trial.profile
    graphs = {call.path: profile.graph_of(call) for call in profile.calls}
    plan = Plan(
        {
            path: UnitPlan({value.name: "offload" for value in graph.values if value.producer is not None})
            for path, graph in graphs.items()
        }
    )
    predicted = Counter(
        profile.graph_of(call).values[value].nbytes
        for call, decision in zip(profile.calls, decide(profile, plan), strict=True)
        for value, _ in decision.trips
    )
    carrier = Sizes()
    with carried_by(lambda: carrier), recollect.apply(trial.model, plan):
        assert_same_gradients(trial.plain, trial.step())
    assert Counter(carrier.sizes) == predicted


# Megatron's own offload.


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
