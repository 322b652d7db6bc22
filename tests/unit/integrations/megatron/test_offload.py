"""What Megatron's settings for offload copy to host memory, against tables written from what Megatron-LM does at d98e8a64.

What autograd saves while a module runs is its input, and what the module itself makes for its own backward:
`self_attention.linear_qkv` saves what the norm before it returns, the norm what enters the layer, and so on.
"""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

import recollect
from megatron_cases import FULL, offload, selective
from recollect.errors import ConfigError, ConfigWarning, NotYetError
from recollect.integrations.megatron import RecomputeConfig, TrainingSetting, megatron_plan, megatron_stage_plans
from recollect.lab.models.gpt import GPTModel
from recollect.lab.models.sizes import NAMED_CONFIGS
from recollect.plans.plan import Plan
from recollect.plans.trip import Trip
from recollect.plans.unit_plan import UnitPlan
from recollect.profile.profile import Profile
from recollect.simulation.decisions import decide
from recollect.simulation.simulate import simulate
from toy_profile import stack

LAYER = "decoder.layers."
SMALL: dict[str, Any] = {"min_offloaded_tensor_size": 600}
"""Below what is as large as the residual stream, 2 x 12 x 64 numbers, and above statistics of norms and kernels."""


@functools.cache
def profile_of(name: str, batch: int = 2, length: int = 12) -> Profile:
    config = NAMED_CONFIGS[name]
    tokens = torch.randint(0, config.vocab_size, (batch, length))
    return recollect.record(GPTModel(config), {"tokens": tokens, "labels": tokens}, fake=True)


def planned(name: str, **fields: Any) -> Plan:
    return megatron_plan(profile_of(name), RecomputeConfig(**fields))


def going(plan: Plan) -> dict[str, set[str]]:
    """What goes out, by unit; layers by their numbers."""
    return {path.removeprefix(LAYER): set(unit.trips) for path, unit in plan.units.items() if unit.trips}


# The inputs of a layer's norms are the output of the layer before it, and of its attention with the residual stream.
SAVED_BY: dict[str, dict[str, set[str]]] = {
    "llama-tiny": {
        "qkv_linear": {"input_layernorm.mul#1"},
        # A kernel's output belongs to the kernel's backward and to that of attn_proj: it needs both.
        "core_attn": {"self_attention.add", "self_attention.add#1", "self_attention.clone"},
        "mlp_norm": {"add", "pre_mlp_layernorm.mul"},
    },
    "mixtral-tiny": {
        "qkv_linear": {"input_layernorm.mul#1"},
        "core_attn": {"self_attention.add", "self_attention.add#1", "self_attention.clone"},
        "mlp_norm": {"add", "pre_mlp_layernorm.mul"},
        "expert_fc1": {"mlp.index"},
        "moe_act": {
            "mlp.experts.linear_fc1._grouped_mm",
            "mlp.experts.activation_func.silu",
            "mlp.experts.activation_func.mul",
        },
        "fused_group_mlp": {
            "mlp.index",
            "mlp.experts.linear_fc1._grouped_mm",
            "mlp.experts.activation_func.silu",
            "mlp.experts.activation_func.mul",
            "mlp.experts.activation_func.mul#1",
        },
    },
    # Attention op by op, with dropout: queries, keys, values, and twice the probabilities; masks are written in place.
    "gpt-tiny": {
        "qkv_linear": {"input_layernorm.native_layer_norm.0"},
        "core_attn": {
            "self_attention.core_attention.clone",
            "self_attention.core_attention.clone#1",
            "self_attention.core_attention.clone#2",
            "self_attention.core_attention._safe_softmax",
            "self_attention.core_attention.mul#2",
        },
        "mlp_norm": {"add"},
    },
    # Latent attention projects down and up again; the core pads the values, for the kernel, and cuts what that returns.
    "deepseek-v3-tiny": {
        "core_attn": {
            "self_attention.qkv_up_proj.cat",
            "self_attention.qkv_up_proj.cat#1",
            "self_attention.core_attention.constant_pad_nd",
            "self_attention.core_attention._scaled_dot_product_flash_attention_for_cpu.0",
        },
        "mlp_norm": {"add", "pre_mlp_layernorm.mul"},
    },
}
LAST_WITH = {"deepseek-v3-tiny": 4}
"""Layers whose groups are not the last ones; by default three of four. In DeepSeek-V3 those of `mtp` are."""


@pytest.mark.parametrize(("name", "module"), [(name, module) for name, table in SAVED_BY.items() for module in table])
def test_each_module(name: str, module: str) -> None:
    """All layers but the last one, whose values backward needs at once."""
    plan = planned(name, **offload(module), **SMALL)
    expected = SAVED_BY[name][module]
    assert going(plan) == {str(i): expected for i in range(LAST_WITH.get(name, 3))}
    assert plan.note == f"Megatron: no recompute, offload of {module}"


def test_what_enters_a_layer_is_of_the_one_before_it() -> None:
    plan = planned("llama-tiny", **offload("attn_norm"), **SMALL)
    inside = {"input_layernorm.mul"}
    assert going(plan) == {
        "embedding": {"word_embeddings.embedding"},
        "0": inside | {"add#1"},
        "1": inside | {"add#1"},
        "2": inside,
    }
    # Where nobody knows the link, it leaves when the layer that saves it has run; the embedding is two units before that, as
    # rotary positions are one.
    unknown = replace(profile_of("llama-tiny"), to_host_bytes_per_s=0.0, from_host_bytes_per_s=0.0)
    plan = megatron_plan(unknown, RecomputeConfig(**offload("attn_norm"), **SMALL))
    assert plan.units["embedding"].trips == {"word_embeddings.embedding": Trip(3, 3)}
    assert plan.units[f"{LAYER}0"].trips == {"input_layernorm.mul": Trip(1, 1), "add#1": Trip(2, 2)}


def test_what_two_modules_save_needs_both() -> None:
    kernel = "self_attention.core_attention._scaled_dot_product_flash_attention_for_cpu.0"
    both = planned("llama-tiny", **offload("core_attn", "attn_proj"), **SMALL)
    assert going(both)["1"] == SAVED_BY["llama-tiny"]["core_attn"] | {kernel}


def test_a_value_is_as_large_as_what_is_saved_of_it() -> None:
    """min_offloaded_tensor_size counts elements: queries are 1536, and keys and values of half as many heads 768."""
    few = planned("llama-tiny", **offload("core_attn"), min_offloaded_tensor_size=769)
    assert going(few)["0"] == {"self_attention.add"}
    all_of_them = planned("llama-tiny", **offload("core_attn"), min_offloaded_tensor_size=768)
    assert going(all_of_them)["0"] == SAVED_BY["llama-tiny"]["core_attn"]
    with pytest.warns(
        ConfigWarning, match=r"nothing is offloaded: of what is kept, .* has 1048576 elements or more\. Lower min"
    ):
        assert going(planned("llama-tiny", **offload("core_attn"))) == {}


@pytest.mark.parametrize(("fraction", "number"), [(0.0, 0), (0.1, 1), (0.4, 3), (0.5, 3), (0.6, 4), (1.0, 6)])
def test_a_fraction_of_the_groups_is_the_first_ones(fraction: float, number: int) -> None:
    """Three layers with two groups each, in forward order; Megatron rounds down what it leaves out."""
    if not number:
        with pytest.warns(ConfigWarning, match="nothing is offloaded"):
            plan = planned(
                "llama-tiny", **offload("qkv_linear", "mlp_norm"), **SMALL, activation_offload_fraction=fraction
            )
    else:
        plan = planned("llama-tiny", **offload("qkv_linear", "mlp_norm"), **SMALL, activation_offload_fraction=fraction)
    groups = [(str(layer), module) for layer in range(3) for module in ("qkv_linear", "mlp_norm")][:number]
    expected: dict[str, set[str]] = {}
    for layer, module in groups:
        expected[layer] = expected.get(layer, set()) | SAVED_BY["llama-tiny"][module]
    assert going(plan) == expected


@pytest.mark.parametrize(("most", "inside", "between"), [(None, 9, 9), (0, 1, 2), (2, 3, 4), (9, 9, 9)])
def test_copies_in_flight_bound_when_a_value_has_left(
    most: int | None, inside: int, between: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else the schedule says: what a layer saves of the one before it has one more unit."""

    def late(profile: Profile, plan: Plan) -> Plan:
        units = {
            path: replace_trips(unit, {name: trip._replace(leaves=9) for name, trip in unit.trips.items()})
            for path, unit in plan.units.items()
        }
        return replace(plan, units=units)

    monkeypatch.setattr("recollect.integrations.megatron.offload.scheduled", late)
    config = RecomputeConfig(**offload("attn_norm"), **SMALL, fine_grained_offloading_max_inflight_offloads=most)
    trips = megatron_plan(profile_of("llama-tiny"), config).units[f"{LAYER}1"].trips
    assert {name: trip.leaves for name, trip in trips.items()} == {"input_layernorm.mul": inside, "add#1": between}


def replace_trips(unit: UnitPlan, trips: dict[str, Trip]) -> UnitPlan:
    return UnitPlan(unit.actions, unit.output, unit.engine, trips=trips)


def large(**fields: Any) -> Plan:
    """Of values of exactly 1 MiB: 2 x 2048 x 64 numbers in single precision."""
    return megatron_plan(profile_of("llama-tiny", 2, 2048), RecomputeConfig(**fields))


def layers_offloaded(n: int) -> dict[str, Any]:
    return {"cpu_offloading": True, "cpu_offloading_num_layers": n}


# All that a layer saves, as large as the residual stream: norms, projections, the kernel, the MLP of three times that width.
WHOLE_LAYER = {
    "input_layernorm.mul", "input_layernorm.mul#1",
    "self_attention.add",
    "self_attention.core_attention._scaled_dot_product_flash_attention_for_cpu.0",
    "add",
    "pre_mlp_layernorm.mul", "pre_mlp_layernorm.mul#1",
    "mlp.linear_fc1.mm", "mlp.activation_func.silu", "mlp.activation_func.mul",
}  # fmt: skip


@pytest.mark.parametrize("n", [1, 2, 3])
def test_whole_layers(n: int) -> None:
    """The first n layers with what enters them; keys and values of half as many heads are below 1 MiB."""
    plan = large(**layers_offloaded(n))
    inside = {str(i): WHOLE_LAYER | ({"add#1"} if i < n - 1 else set()) for i in range(n)}
    assert going(plan) == {"embedding": {"word_embeddings.embedding"}, **inside}
    assert plan.note == f"Megatron: no recompute, offload of the first {n} layers"
    assert plan.predicted_peak_bytes is not None and plan.predicted_host_bytes is not None
    assert plan.predicted_host_bytes == sum(
        value.nbytes for path, unit in plan.units.items() for value in graph_of(path).values if value.name in unit.trips
    )


def graph_of(path: str) -> Any:
    profile = profile_of("llama-tiny", 2, 2048)
    return profile.graph_of(profile.calls[profile.calls_by_path[path][0]])


def test_layers_offload_nothing_below_a_mebibyte() -> None:
    with pytest.warns(
        ConfigWarning, match=r"nothing that only these layers save has 1 MiB or more\. Leave the setting out"
    ):
        assert going(planned("llama-tiny", **layers_offloaded(3))) == {}


RECOMPUTE: dict[str, tuple[dict[str, Any], set[str]]] = {
    "full": (FULL, set()),
    "regions": ({**FULL, "recompute_num_layers": 4}, set()),
    "block": ({**FULL, "recompute_method": "block", "recompute_num_layers": 4}, set()),
    "core_attn": (selective("core_attn"), WHOLE_LAYER),
    "mlp": (selective("mlp"), {value for value in WHOLE_LAYER if not value.startswith("mlp.")}),
    "layernorm": (selective("layernorm"), {value for value in WHOLE_LAYER if "layernorm" not in value}),
}


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_what_is_recomputed_does_not_go_out(recompute: str) -> None:
    """What a recompute starts from does; between the layers of a region, nothing is left to recompute from."""
    fields, inside = RECOMPUTE[recompute]
    found = going(large(**fields, **layers_offloaded(2)))
    between = set() if recompute == "regions" else {"add#1"}
    expected = {"0": inside | between, "1": inside}
    assert found == {
        "embedding": {"word_embeddings.embedding"},
        **{key: names for key, names in expected.items() if names},
    }


def test_nothing_is_asked_for_early() -> None:
    """Values are away from when the last unit that saves them has run until backward comes near it."""
    profile = profile_of("llama-tiny", 2, 2048)
    for fields in ({}, FULL, {**FULL, "recompute_num_layers": 4}, selective("mlp")):
        plan = large(**fields, **layers_offloaded(3))
        simulation = simulate(profile, decide(profile, plan))
        assert simulation.num_missed == 0
        assert simulation.host_bytes == plan.predicted_host_bytes
        assert simulation.peak_bytes == plan.predicted_peak_bytes
        kept = megatron_plan(profile, RecomputeConfig(**fields)).predicted_peak_bytes
        # A region of all layers is recomputed as a whole, from the one value that is away.
        assert kept is not None and (simulation.peak_bytes < kept or fields.get("recompute_num_layers") == 4)


def test_layers_that_there_are_not() -> None:
    with pytest.raises(
        ConfigError, match=r"num_layers=4: all layers cannot be offloaded.*to 3 or less.*offload-num-layers"
    ):
        large(**layers_offloaded(4))


def test_modules_that_there_are_not() -> None:
    with pytest.raises(ConfigError, match=r"got offload_modules=\('moe_act',\): no layer of this model has moe_act"):
        planned("llama-tiny", **offload("moe_act"))
    message = "no layer of this model has gdp_qkv; of mlp_norm gdp_qkv the others are offloaded"
    with pytest.warns(ConfigWarning, match=message):
        assert going(planned("llama-tiny", **offload("mlp_norm", "gdp_qkv"), **SMALL))


def test_pipelines_are_refused_by_name() -> None:
    setting = TrainingSetting(num_layers=4, pipeline_model_parallel_size=2)
    profile = profile_of("llama-tiny")
    with pytest.raises(ConfigError, match=r"cpu_offloading=True, pipeline_model_parallel_size=2.*offload-pipeline"):
        megatron_plan(profile, RecomputeConfig(**layers_offloaded(1)), setting)
    message = r"offload_modules=\('core_attn',\), pipeline_model_parallel_size=2: not yet: plans of copies for several"
    with pytest.raises(NotYetError, match=message):
        megatron_plan(profile, RecomputeConfig(**offload("core_attn")), setting)
    schedule = recollect.PipelineSchedule.one_f_one_b(num_stages=2, num_micro_batches=4)
    for fields in (layers_offloaded(1), offload("core_attn")):
        with pytest.raises(NotYetError, match="pipeline_model_parallel_size=2: not yet: plans of copies for several"):
            megatron_stage_plans([stack(4)] * 2, schedule, RecomputeConfig(**fields))
