"""Megatron's settings as plans, on profiles made by hand: which layers, which outputs, which values."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from recollect.errors import ConfigError, ConfigWarning, NotYetError
from recollect.integrations.megatron import RecomputeConfig, TrainingSetting, megatron_plan
from recollect.integrations.megatron.module_values import LayerOps, values_of_module
from recollect.planning.classic import classic_plan
from recollect.plans.action import Action
from recollect.plans.plan import Plan
from recollect.profile.graph import OpRecord, UnitCall, UnitGraph, ValueRecord
from recollect.profile.profile import Profile
from toy_profile import GATHER, gathering_layer, layer, stack


def planned(profile: Profile, setting: TrainingSetting | None = None, **fields: Any) -> Plan:
    return megatron_plan(profile, RecomputeConfig(**fields), setting)


def full(profile: Profile, method: str, num_layers: int, setting: TrainingSetting | None = None) -> Plan:
    return planned(
        profile, setting, recompute_granularity="full", recompute_method=method, recompute_num_layers=num_layers
    )


def selective(profile: Profile, *modules: str, **fields: Any) -> Plan:
    return planned(profile, recompute_granularity="selective", recompute_modules=modules, **fields)


def outputs(plan: Plan) -> str:
    """One letter a layer: keep or drop."""
    return "".join("k" if unit.output == "keep" else "d" for unit in plan.units.values())


def recomputed(plan: Plan) -> str:
    """One letter a layer: + if it recomputes anything."""
    return "".join("+" if unit.recomputes_anything else "-" for unit in plan.units.values())


def test_nothing_asked_for_keeps_all() -> None:
    profile = stack(4)
    assert planned(profile).units == classic_plan(profile, "keep_all").units


def test_uniform_1_is_full() -> None:
    profile = stack(4)
    assert full(profile, "uniform", 1).units == classic_plan(profile, "full").units


@pytest.mark.parametrize(
    ("num_layers", "expected"), [(2, "dkdkdkdk"), (3, "ddkddkdk"), (4, "dddkdddk"), (5, "ddddkddk"), (8, "dddddddk")]
)
def test_uniform_drops_what_is_between_the_layers_of_a_region(num_layers: int, expected: str) -> None:
    plan = full(stack(8), "uniform", num_layers)
    assert outputs(plan) == expected
    assert recomputed(plan) == "+" * 8
    assert plan.note == f"Megatron: full, uniform, {num_layers}"


def test_uniform_is_counted_in_each_virtual_stage() -> None:
    """Stages of four layers each; regions of three do not reach across them."""
    setting = TrainingSetting(num_layers=8, pipeline_model_parallel_size=2)
    assert outputs(full(stack(8), "uniform", 3, setting)) == "ddkkddkk"


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (TrainingSetting(), "++------"),
        (TrainingSetting(num_layers=8, pipeline_model_parallel_size=2), "++--++--"),
        (TrainingSetting(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2), "++++++++"),
        (
            TrainingSetting(
                pipeline_model_parallel_size=3,
                num_layers_in_first_pipeline_stage=3,
                num_layers_in_last_pipeline_stage=1,
            ),
            "++-++--+",
        ),
    ],
)
def test_block_recomputes_the_first_layers_of_each_virtual_stage(setting: TrainingSetting, expected: str) -> None:
    plan = full(stack(8), "block", 2, setting)
    assert recomputed(plan) == expected
    assert outputs(plan) == "k" * 8


def test_layers_that_others_read_too_keep_their_output() -> None:
    profile = stack(4)
    calls = list(profile.calls)
    calls[4] = replace(calls[4], origins=((0, 2, 4),))
    assert outputs(full(replace(profile, calls=tuple(calls)), "uniform", 4)) == "dkdk"


def test_two_stacks_are_counted_apart() -> None:
    profile = stack(6)
    renamed = [
        replace(call, path=f"{'encoder' if index < 3 else 'decoder'}.{call.path}") if call.repeated else call
        for index, call in enumerate(profile.calls, start=-1)
    ]
    profile = replace(profile, calls=tuple(renamed))
    assert recomputed(full(profile, "block", 1)) == "+--+--"


def test_a_module_drops_its_inside_and_keeps_its_output() -> None:
    plan = selective(stack(2), "mlp")
    assert dict(plan.units["layers.0"].actions) == {
        "norm.mul": "keep",
        "mlp.up.mm": "recompute",
        "mlp.act.silu": "recompute",
        "mlp.down.mm": "keep",
    }
    assert plan.units["layers.0"].output == "keep"
    assert plan.note == "Megatron: selective, mlp"


def test_a_module_drops_its_output_where_that_is_asked_for() -> None:
    plan = selective(stack(2), "mlp", recompute_discard_outputs=["mlp"])
    assert plan.units["layers.0"].actions["mlp.down.mm"] == "recompute"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    ],
)
def test_what_is_gathered_is_gathered_again(fields: dict[str, Any]) -> None:
    """Of the last layer, whose own recompute none of these settings asks for."""
    dropped = {
        name
        for name, action in planned(stack(2, graph=gathering_layer()), **fields).units["layers.1"].actions.items()
        if action == "recompute"
    }
    assert dropped - {"input_layernorm.mul"} == {GATHER, "mlp.cat"}


def test_a_gather_that_may_not_run_again_is_kept() -> None:
    assert not planned(stack(2, graph=gathering_layer(replays=False))).units["layers.1"].recomputes_anything


def test_a_set_of_which_the_model_has_nothing_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"got recompute_modules=\('moe', 'moe_act'\): no layer .* has moe or moe_act"
    ):
        selective(stack(2), "moe", "moe_act")


def test_a_module_that_the_model_has_not_is_a_warning_beside_one_that_it_has() -> None:
    with pytest.warns(ConfigWarning, match="no layer of this model has moe; of mlp moe the others are recomputed"):
        plan = selective(stack(2), "mlp", "moe")
    assert plan.units == selective(stack(2), "mlp").units


@pytest.mark.parametrize(
    ("setting", "num_layers", "message"),
    [
        (None, 9, r"got recompute_method='block', recompute_num_layers=9: the model has 8 layers\. Set .* 1 to 8"),
        (TrainingSetting(pipeline_model_parallel_size=4), 3, r"the largest of 4 model chunks has 2 layers"),
        (
            TrainingSetting(num_layers=8, pipeline_model_parallel_size=4),
            3,
            r"the largest of 4 model chunks has 2 layers",
        ),
        (
            TrainingSetting(num_layers=7),
            1,
            r"got num_layers=7: the recorded model has 8 layers in layers\. Set it to 8",
        ),
        (
            TrainingSetting(pipeline_model_parallel_size=3),
            1,
            r"got num_layers=8, pipeline_model_parallel_size=3: the layers cannot be divided among the stages\. Each",
        ),
        (
            TrainingSetting(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=3),
            1,
            r"got num_layers=8, .*virtual_pipeline_model_parallel_size=3: the layers cannot be divided",
        ),
    ],
)
def test_layers_that_do_not_fit_the_model(setting: TrainingSetting | None, num_layers: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        full(stack(8), "block", num_layers, setting)


def test_a_pipeline_cuts_one_stack_only() -> None:
    profile = stack(1)
    calls = (*profile.calls[:2], UnitCall("decoder.0", 1, repeated=True), profile.calls[2])
    with pytest.raises(ConfigError, match=r"the layers stand in 2 blocks, layers, decoder, and a pipeline cuts one"):
        full(replace(profile, calls=calls), "block", 1, TrainingSetting(pipeline_model_parallel_size=2))


def test_what_is_not_built_is_refused_after_it_was_checked() -> None:
    with pytest.raises(NotYetError, match=r"got fp4='e2m1': not yet: models that compute in 4 bits"):
        planned(stack(2), TrainingSetting(fp4="e2m1"))


def test_of_opaque_layers_all_that_the_tape_cannot_recompute_is_kept() -> None:
    graph = layer()
    opaque = replace(graph, values=tuple(replace(value, must_keep=value.saved) for value in graph.values))
    actions = full(stack(2, graph=opaque), "uniform", 1).units["layers.0"].actions
    kept = {name for name, action in actions.items() if action is Action.KEEP}
    assert kept == {value.name for value in graph.values if value.saved and value.producer is not None} != set()


@pytest.mark.filterwarnings("ignore:full scope is deprecated")  # megatron-core warns of its own default
@pytest.mark.parametrize(("num_layers", "expected"), [(4, "+-+-"), (2, "+-")])
def test_its_own_configuration_has_the_facts_too_for_all_stages_and_for_one(num_layers: int, expected: str) -> None:
    megatron = pytest.importorskip("megatron.core.transformer.transformer_config")
    layout = {"num_layers": 4, "pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
    config = megatron.TransformerConfig(hidden_size=8, num_attention_heads=2, **layout)
    assert str(megatron_plan(stack(num_layers), config).note) == "Megatron: no recompute"
    config.recompute_granularity, config.recompute_method, config.recompute_num_layers = "full", "block", 1
    assert recomputed(megatron_plan(stack(num_layers), config)) == expected


def layer_of(*ops: tuple[str, tuple[str, ...]]) -> tuple[LayerOps, list[str]]:
    names = ["input", *(name for name, _ in ops)]
    values = [ValueRecord("input", 8, producer=None)]
    values += [ValueRecord(name, 8, producer=number) for number, (name, _) in enumerate(ops)]
    records = [
        OpRecord(name, tuple(map(names.index, inputs)), (number,), 0.1)
        for number, (name, inputs) in enumerate(ops, start=1)
    ]
    return LayerOps(UnitGraph(tuple(values), tuple(records))), names


@pytest.mark.parametrize("experts", ["mlp.experts", "block_sparse_moe.experts.0"])
def test_products_before_the_one_down_are_part_of_the_activation_of_experts(experts: str) -> None:
    """As in megatron-core, down(cast(act(gate) * up * weight)), and in Hugging Face, down(act(gate) * up) * weight."""
    gate, up, act, down = (f"{experts}.{name}" for name in ("gate.mm", "up.mm", "act_fn.silu", "down.mm"))
    layer_ops, names = layer_of(
        ("mlp.router.mm", ("input",)),
        (gate, ("input",)),
        (act, (gate,)),
        (up, ("input",)),
        (f"{experts}.mul", (act, up)),
        (f"{experts}.mul#1", (f"{experts}.mul", "mlp.router.mm")),
        (f"{experts}._to_copy", (f"{experts}.mul#1",)),
        (down, (f"{experts}._to_copy",)),
        (f"{experts}.mul#2", (down, "mlp.router.mm")),
    )
    found = {names[value].removeprefix(experts) for value in values_of_module(layer_ops, "moe_act")}
    assert found == {".act_fn.silu", ".mul", ".mul#1", "._to_copy"}


def test_a_dense_layer_has_no_activation_of_experts() -> None:
    layer_ops, _ = layer_of(
        ("mlp.gate.mm", ("input",)), ("mlp.act_fn.silu", ("mlp.gate.mm",)), ("mlp.mul", ("mlp.act_fn.silu", "input"))
    )
    assert values_of_module(layer_ops, "moe_act") == frozenset()
