"""Steps of Mixtral and DeepSeek-V3 under plans: the same bits, the same routes, with everything that draws
random numbers, counts or adds to the loss switched on.
"""

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import recollect
from gradients import assert_same_gradients, gradients
from policies import NOTHING_KEPT
from predictions import LEAN_LOOP, classic_peaks
from recollect.applying import apply_policy
from recollect.errors import RecordError
from recollect.integrations.megatron import RecomputeConfig, TrainingSetting, megatron_plan
from recollect.lab.models.gpt import GPTModel
from recollect.lab.models.router import Routing, TopKRouter
from recollect.lab.models.sizes import NAMED_CONFIGS
from recollect.profile.profile import Profile
from recollect.recording.find_units import find_units
from tiers import long, long_but
from watch import Watch

CASES = {
    "mixtral": ("mixtral-tiny", {"num_layers": 2, "core_attention": "fused"}),
    "mixtral-unfused": (
        "mixtral-tiny",
        {"core_attention": "unfused", "moe_router_load_balancing_type": "seq_aux_loss"},
    ),
    "mixtral-loop": ("mixtral-tiny", {"moe_grouped_gemm": False, "moe_layer_freq": 2, "add_bias_linear": True}),
    "deepseek-v3": ("deepseek-v3-tiny", {"num_layers": 2, "moe_layer_freq": (0, 1), "mtp_num_layers": 1}),
    "deepseek-v3-unfused": ("deepseek-v3-tiny", {"core_attention": "unfused", "moe_aux_loss_coeff": 0.1}),
}
# DeepSeek has all that Mixtral has.
every_model = pytest.mark.parametrize("case", long_but(["deepseek-v3"], ["mixtral", "deepseek-v3"]))


def model_of(case: str, dropout: float = 0.1, **more: Any) -> GPTModel:
    name, changes = CASES[case]
    torch.manual_seed(0)
    rates = {"hidden_dropout": dropout, "attention_dropout": dropout}
    return GPTModel(dataclasses.replace(NAMED_CONFIGS[name], **{**rates, **changes, **more}))


def batch_of(seed: int = 0, sequences: int = 2, length: int = 16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(256, (sequences, length + 1), generator=generator)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def loss_of(output: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss


def unit_paths(model: GPTModel) -> list[str]:
    return [unit.path for unit in find_units(model)]


@every_model
def test_routes_are_chosen_once(case: str) -> None:
    model, batch = model_of(case), batch_of()
    routes: list[Tensor] = []

    def note(_module: Any, _inputs: Any, routing: Routing) -> None:
        routes.append(routing.experts_NJ)

    for module in model.modules():
        if isinstance(module, TopKRouter):
            module.register_forward_hook(note)
    gradients(model, batch, loss_of)
    plain, routes = routes, []
    with apply_policy(model, unit_paths(model), NOTHING_KEPT), Watch() as watch:
        gradients(model, batch, loss_of)
    assert len(plain) == len(routes) > 0
    assert all(torch.equal(*pair) for pair in zip(plain, routes, strict=True))
    with Watch() as unplanned:
        gradients(model, batch, loss_of)
    for op in ("topk", "sort"):
        assert watch.computing_ops()[op] == unplanned.computing_ops()[op] > 0
    assert watch.computing_ops()["_grouped_mm"] > unplanned.computing_ops()["_grouped_mm"]


@cache
def recorded(case: str) -> Profile:
    return recollect.record(model_of(case), batch_of(sequences=4, length=64), **LEAN_LOOP)


def _tight_budget_bytes(profile: Profile) -> int:
    """What is always there, and half of what the step without recompute adds to it."""
    return (recollect.classic_plan(profile, "keep_all").predicted_peak_bytes + profile.persistent_bytes) // 2


@pytest.mark.parametrize("case", long_but(("deepseek-v3",), [case for case in CASES if case != "mixtral-loop"]))
def test_fake_recording_is_that_of_a_real_one(case: str) -> None:
    model, batch = model_of(case), batch_of()
    real, fake = recollect.record(model, batch, **LEAN_LOOP), recollect.record(model, batch, fake=True, **LEAN_LOOP)
    assert [call.path for call in real.calls] == [call.path for call in fake.calls]
    assert [graph.values for graph in real.graphs] == [graph.values for graph in fake.graphs]
    assert classic_peaks(fake) == pytest.approx(classic_peaks(real), rel=0.001)


@pytest.mark.parametrize("name", long(["mixtral-8x7b", "deepseek-v3-671b"]))
def test_published_models_are_recorded(name: str) -> None:
    with torch.device("meta"):
        model = GPTModel(NAMED_CONFIGS[name]).bfloat16()
        tokens = torch.zeros(1, 4096, dtype=torch.int64)
    profile = recollect.record(model, {"tokens": tokens, "labels": tokens}, fake=True, **LEAN_LOOP)
    assert profile.persistent["parameters"] == 2 * NAMED_CONFIGS[name].num_parameters


def test_loop_over_experts_cannot_be_recorded_on_fake_tensors() -> None:
    """How many rows an expert gets is the content of a tensor; `moe_grouped_gemm` does not ask for it."""
    with pytest.raises(RecordError, match="asks for the content of a tensor"):
        recollect.record(model_of("mixtral-loop"), batch_of(), fake=True, **LEAN_LOOP)


@every_model
def test_a_budget_holds(case: str) -> None:
    model, batch, profile = model_of(case), batch_of(sequences=4, length=64), recorded(case)
    plan = recollect.plan(profile, _tight_budget_bytes(profile))
    report = recollect.verify(model, batch, plan, time=False, **LEAN_LOOP)
    assert report.gradients_equal
    assert report.plan_peak_bytes <= (plan.budget_bytes or 0)
    assert report.plan_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=0.005)


def test_two_depths_are_counted_apart_from_the_decoder() -> None:
    """Each depth is a unit then; four layers are still four."""
    model, batch = model_of("deepseek-v3", num_layers=4, moe_layer_freq=(0, 1, 1, 1), mtp_num_layers=2), batch_of()
    uniform = RecomputeConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=4)
    plan = megatron_plan(recollect.record(model, batch), uniform, TrainingSetting.of(model.config))
    dropped = [path for path, unit in plan.units.items() if unit.output == "recompute"]
    assert dropped == [f"decoder.layers.{i}" for i in range(3)] and plan.units["mtp.layers.1"].recomputes_anything
    expected = gradients(model, batch, loss_of)
    with recollect.apply(model, plan):
        assert_same_gradients(expected, gradients(model, batch, loss_of))
