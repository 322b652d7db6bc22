"""`policy_plan`: a plan that keeps what a policy saves, and a peak that it then has."""

import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import recollect
from recollect.errors import ArgumentError, ConfigError
from recollect.lab.models.architectures import llama_config
from recollect.lab.models.gpt import GPTModel
from small_llama import batch_of, llama

MM = torch.ops.aten.mm.default


class Recorded(NamedTuple):
    """A step, and its profile."""

    profile: recollect.Profile
    model: GPTModel
    batch: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def step() -> Recorded:
    model = llama(llama_config(num_layers=3, hidden_size=64, num_attention_heads=4, vocab_size=64))
    batch = batch_of(model.config, 2, 64)
    return Recorded(recollect.record(model, batch), model, batch)


def saves_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is MM else CheckpointPolicy.MUST_RECOMPUTE


def kept_in(plan: recollect.Plan, path: str = "decoder.layers.1") -> set[str]:
    return {name for name, action in plan.units[path].actions.items() if action == "keep"}


def test_what_is_saved_is_kept_and_the_peak_is_the_predicted_one(step: Recorded) -> None:
    profile, model, batch = step
    before = torch.get_rng_state()
    plan = recollect.policy_plan(*step, saves_products)
    assert torch.equal(torch.get_rng_state(), before)
    assert recollect.applied_to(model) == []
    kept = kept_in(plan)
    assert kept and all(name.partition("#")[0].endswith("mm") for name in kept)
    assert list(plan.units) == [f"decoder.layers.{index}" for index in range(3)]
    report = recollect.verify(model, batch, plan, time=False)
    assert report.equal
    assert plan.predicted_peak_bytes == pytest.approx(report.plan_peak_bytes, abs=2048)
    full, nothing = (recollect.classic_plan(profile, name) for name in ("full", "keep_all"))
    assert full.predicted_peak_bytes < plan.predicted_peak_bytes < nothing.predicted_peak_bytes


def test_the_plan_holds_as_much_as_the_policy_itself(step: Recorded) -> None:
    _, model, batch = step
    plan = recollect.policy_plan(*step, saves_products)
    is_layer = type(model.decoder.layers[0])

    def held_bytes() -> int:
        return recollect.measure_peak(lambda: model(**batch), device="cpu", baseline_bytes=0).end_bytes

    with recollect.apply(model, plan):
        planned = held_bytes()
    with recollect.apply_activation_checkpointing(
        model, check_fn=lambda module: isinstance(module, is_layer), policy_fn=saves_products
    ):
        assert held_bytes() == planned


def test_a_list_a_fake_profile_and_a_policy_that_counts(step: Recorded) -> None:
    _, model, batch = step
    plan = recollect.policy_plan(*step, [MM])
    assert plan.units == recollect.policy_plan(*step, saves_products).units
    fake = recollect.record(model, batch, fake=True)
    assert recollect.policy_plan(fake, model, batch, [MM]).units == plan.units

    def every_second() -> Any:
        count = 0

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
            nonlocal count
            count += op is MM
            return op is MM and count % 2 == 0

        return create_selective_checkpoint_contexts(policy)

    half = recollect.policy_plan(*step, context_fn=every_second)
    assert len(kept_in(half)) == len(kept_in(plan)) // 2
    assert kept_in(half, "decoder.layers.0") == kept_in(half, "decoder.layers.2")


def test_what_a_policy_prefers_is_what_the_plan_does(step: Recorded) -> None:
    def prefers(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.PREFER_SAVE if op is MM else CheckpointPolicy.PREFER_RECOMPUTE

    preferred, required = (recollect.policy_plan(*step, policy) for policy in (prefers, saves_products))
    assert kept_in(preferred)
    assert preferred.units == required.units


@pytest.mark.parametrize("answer", [CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD])
def test_what_is_offloaded_goes_to_host_memory_if_backward_asks_for_it(
    step: Recorded, answer: CheckpointPolicy
) -> None:
    profile, model, batch = step

    def offloads_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return answer if op is MM else CheckpointPolicy.PREFER_RECOMPUTE

    plan = recollect.policy_plan(*step, offloads_products)
    away = {name for name, action in plan.units["decoder.layers.1"].actions.items() if action == "offload"}
    # Backward asks for one product of each layer; queries, keys, values and what enters the residual stream are not saved.
    assert away == {"mlp.linear_fc1.mm"}
    assert list(plan.units) == [call.path for call in profile.calls]
    graph = profile.graph_of(profile.calls[profile.calls_by_path["decoder.layers.1"][0]])
    (nbytes,) = (value.nbytes for value in graph.values if value.name in away)
    assert plan.predicted_host_bytes == 3 * nbytes
    report = recollect.verify(model, batch, plan, time=False)
    assert report.equal
    assert plan.predicted_peak_bytes == pytest.approx(report.plan_peak_bytes, abs=2048)
    saved = recollect.policy_plan(*step, saves_products)
    assert plan.predicted_peak_bytes < saved.predicted_peak_bytes


def test_mistakes(step: Recorded) -> None:
    profile, model, batch = step
    with pytest.raises(ArgumentError, match="got an object of class GPTModel as profile"):
        recollect.policy_plan(model, profile, batch, [MM])  # type: ignore[arg-type]
    for policies in (
        {},
        {"policy_fn": [MM], "context_fn": functools.partial(create_selective_checkpoint_contexts, [MM])},
    ):
        with pytest.raises(ConfigError, match="a plan has one policy"):
            recollect.policy_plan(*step, **policies)
    assert recollect.applied_to(model) == []
    with pytest.raises(ValueError, match="OpOverload"):
        recollect.policy_plan(*step, [torch.ops.aten.mm])
