"""Plans as the nearest settings of Megatron and torchtitan: the fastest that fit, by trying all, and back again."""

import itertools
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import tyro

import recollect
from recollect.cli.recompute_flags import RecomputeFlags
from recollect.errors import BudgetTooSmallError, ConfigError, ConfigWarning, PlanError
from recollect.integrations.megatron import RecomputeConfig, megatron_plan
from recollect.integrations.megatron.nearest import (
    bridge_lines,
    hidden_s,
    megatron_flags,
    nearest_settings,
    nearest_uniform_settings,
)
from recollect.integrations.torchtitan_settings import nearest_policy, torchtitan_flags, torchtitan_plan
from recollect.lab.models.architectures import llama_config
from recollect.lab.models.gpt import GPTModel
from recollect.plans.plan import Plan
from recollect.profile.events import WORK, StepLog
from recollect.profile.profile import Profile
from tiers import long_but
from toy_profile import gathering_layer, stack

MODULES = ("core_attn", "mlp", "layernorm")
OUTSIDE_S = 3.0


@pytest.fixture(scope="module")
def recorded() -> tuple[GPTModel, dict[str, torch.Tensor], Profile]:
    model = GPTModel(llama_config(num_layers=4, hidden_size=64, num_attention_heads=4, vocab_size=128))
    tokens = torch.randint(0, 128, (8, 128))
    batch = {"tokens": tokens, "labels": tokens}
    return model, batch, recollect.record(model, batch, fake=True)


@pytest.fixture(scope="module")
def profile(recorded: tuple[Any, Any, Profile]) -> Profile:
    return recorded[2]


def settings_of_megatron(num_layers: int, modules: tuple[str, ...]) -> list[RecomputeConfig]:
    fields: list[dict[str, Any]] = [{}]
    for method, number in itertools.product(("uniform", "block"), range(1, num_layers + 1)):
        fields.append({"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": number})
    for count in range(1, len(modules) + 1):
        for names in itertools.combinations(modules, count):
            fields.append({"recompute_granularity": "selective", "recompute_modules": names})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)
        return [RecomputeConfig(**settings) for settings in fields]


def all_of_megatron(profile: Profile) -> list[Plan]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)
        return [megatron_plan(profile, config) for config in settings_of_megatron(4, MODULES)]


def read_back(flags: str) -> RecomputeConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)
        return RecomputeConfig(**tyro.cli(RecomputeFlags, args=flags.split()).fields())


@pytest.mark.parametrize("percent", long_but([55, 70, 85, 100], range(55, 101, 5)))
def test_the_nearest_settings_are_the_fastest_that_fit(profile: Profile, percent: int) -> None:
    wanted = recollect.plan(profile, f"{percent}%")
    found = nearest_settings(profile, wanted)
    fitting = [plan for plan in all_of_megatron(profile) if plan.predicted_peak_bytes <= wanted.budget_bytes]
    fastest = min((plan.predicted_slowdown, plan.predicted_peak_bytes) for plan in fitting)
    assert (found.plan.predicted_slowdown, found.plan.predicted_peak_bytes) == fastest
    assert found.lost_s == (fastest[0] - wanted.predicted_slowdown) * profile.step_s >= 0
    assert found.unused_bytes == wanted.budget_bytes - fastest[1] >= 0
    assert megatron_plan(profile, found.settings) == found.plan
    # What is written means the same plan.
    again = read_back(megatron_flags(found.settings))
    assert again == found.settings
    cfg: Any = type("Recipe", (), {"model": type("Model", (), {})()})()
    exec(bridge_lines(found.settings), {"cfg": cfg})  # noqa: S102, our own lines
    assert RecomputeConfig(**vars(cfg.model)) == found.settings


def test_what_is_said(profile: Profile) -> None:
    text = str(nearest_settings(profile, recollect.plan(profile, "70%")))
    first, second, third = text.splitlines()
    assert first.startswith("the plan ") and second.startswith("Megatron: ")
    assert third.startswith("lost: ") and third.endswith(" of the budget are not used")


def test_no_recompute_is_written_too(profile: Profile) -> None:
    found = nearest_settings(profile, recollect.plan(profile, "100%"))
    assert found.settings == RecomputeConfig() and megatron_flags(found.settings) == ""
    assert bridge_lines(found.settings) == "cfg.model.recompute_granularity = None"


@pytest.mark.parametrize(
    ("gather_s", "fields", "expected_s"),
    [
        (0.05, {}, 2 * 0.05),
        # No longer than what reads it, 0.2 and 0.04 s.
        (0.5, {}, 2 * 0.24),
        # The product runs again, and waits for its input.
        (0.05, {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, 0.0),
        (0.05, {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}, 0.05),
    ],
)
def test_megatron_gathers_beside_its_products(gather_s: float, fields: dict[str, Any], expected_s: float) -> None:
    profile = stack(2, graph=gathering_layer(gather_s=gather_s))
    assert hidden_s(profile, megatron_plan(profile, RecomputeConfig(**fields))) == pytest.approx(expected_s)


def test_only_what_runs_again_is_hidden() -> None:
    # A frozen product saves no input for backward.
    profile = stack(2, graph=gathering_layer(is_saved=False))
    assert hidden_s(profile, megatron_plan(profile, RecomputeConfig())) == 0.0


def test_what_is_hidden_is_no_slowdown() -> None:
    profile = stack(2, graph=gathering_layer())
    plan = megatron_plan(profile, RecomputeConfig())
    found = nearest_settings(profile, plan)
    assert found.settings == RecomputeConfig()
    # The order of what is gathered takes 0.02 s in each layer, which nothing hides.
    assert plan.predicted_slowdown * profile.step_s == pytest.approx(2 * 0.07)
    assert found.plan.predicted_slowdown * profile.step_s == pytest.approx(2 * 0.02)


def outside_of_units(profile: Profile, seconds: float) -> Profile:
    """The same step with ops outside of its units that take so long together."""
    events = profile.log.events
    time_ns = round(1e9 * seconds / sum(event[0] == WORK for event in events))
    units_s = sum(profile.graph_of(call).forward_s for call in profile.calls)
    log = StepLog(tuple((*event[:2], time_ns) if event[0] == WORK else event for event in events))
    return replace(profile, log=log, step_s=units_s + seconds)


@pytest.mark.parametrize("percent", [55, 65, 75, 85, 95])
def test_the_nearest_settings_of_a_pipeline_are_the_fastest_that_fit(percent: int) -> None:
    persistent = {"parameters": 1000, "gradients": 1000}
    first, last = (replace(stack(n, graph=gathering_layer()), persistent=persistent) for n in (3, 2))
    profiles = [outside_of_units(profile, OUTSIDE_S) for profile in (first, last)]
    schedule = recollect.PipelineSchedule.one_f_one_b(num_stages=2, num_micro_batches=4)
    planned = recollect.plan_pipeline(profiles, schedule, f"{percent}%")
    fitting = []
    for config in settings_of_megatron(2, ("mlp", "layernorm")):
        plans = [megatron_plan(profile, config) for profile in profiles]
        hidden = [hidden_s(profile, plan) for profile, plan in zip(profiles, plans, strict=True)]
        # As if the hidden seconds were not part of the step.
        shorter = [outside_of_units(p, OUTSIDE_S - s) for p, s in zip(profiles, hidden, strict=True)]
        found = recollect.predict_pipeline(shorter, schedule, plans)
        added_s = sum(plan.predicted_slowdown * p.step_s for plan, p in zip(plans, profiles, strict=True)) - sum(hidden)
        fitting += [(added_s, found.step_s, found.peak_bytes)] if found.peak_bytes <= planned.budget_bytes else []
    _, step_s, peak_bytes = min(fitting)
    _, uniform = nearest_uniform_settings(profiles, planned)
    assert uniform.step_s == pytest.approx(step_s) and uniform.peak_bytes == peak_bytes


def test_what_cannot_be_written(profile: Profile) -> None:
    with pytest.raises(PlanError, match="nearest settings: got a plan without predicted peak and slowdown"):
        nearest_settings(profile, Plan({}))
    least = min(plan.predicted_peak_bytes for plan in all_of_megatron(profile))
    wanted = Plan({}, budget_bytes=least - 1, predicted_peak_bytes=least - 1, predicted_slowdown=0.5)
    with pytest.raises(BudgetTooSmallError, match=r"That is the peak of Megatron: .*, the leanest of the other tool"):
        nearest_settings(profile, wanted)
    with pytest.raises(ConfigError, match=r"activation_checkpoint='memory-budget': no plan says what it does\. Choose"):
        torchtitan_plan(profile, "memory-budget")


@pytest.mark.parametrize("percent", [60, 75, 90, 100])
def test_the_nearest_policy_of_torchtitan(profile: Profile, percent: int) -> None:
    wanted = recollect.plan(profile, f"{percent}%")
    found = nearest_policy(profile, wanted)
    plans = [torchtitan_plan(profile, policy) for policy in ("none", "selective", "full")]
    fitting = [plan for plan in plans if plan.predicted_peak_bytes <= wanted.budget_bytes]
    assert found.plan == min(fitting, key=lambda plan: plan.predicted_slowdown)
    assert torchtitan_plan(profile, found.settings) == found.plan
    assert torchtitan_flags(found.settings) == f"activation-checkpoint:{found.settings}"


def test_torchtitans_policies_are_what_torchtitan_does(recorded: tuple[GPTModel, dict[str, Any], Profile]) -> None:
    pytest.importorskip("torchtitan", reason="needs torchtitan")
    from torchtitan.distributed.activation_checkpoint import SelectiveAC

    class OnTheCPU(SelectiveAC):
        def get_save_ops(self) -> set[Any]:
            return {*super().get_save_ops(), torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default}

    model, batch, profile = recorded
    wrapped: Any = OnTheCPU(SelectiveAC.Config())._wrap_block(model.decoder.layers[0])
    contexts = wrapped.checkpoint_fn.keywords["context_fn"]
    expected = recollect.policy_plan(profile, model, batch, context_fn=contexts)
    assert torchtitan_plan(profile, "selective").units == expected.units
