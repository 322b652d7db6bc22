"""Which values of a layer a module of Megatron stands for, on graphs made by hand."""

from __future__ import annotations

import pytest

from recollect.integrations.megatron.module_values import LayerOps, values_of_module
from recollect.profile.graph import OpRecord, UnitGraph, ValueRecord


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
def test_the_product_with_a_gate_is_part_of_the_activation_of_experts(experts: str) -> None:
    """As Mixtral's experts in Hugging Face: down(act(gate) * up) * weight, where the weight is no part of it."""
    gate, up, act, down = (f"{experts}.{name}" for name in ("gate.mm", "up.mm", "act_fn.silu", "down.mm"))
    layer, names = layer_of(
        ("mlp.router.mm", ("input",)),
        (gate, ("input",)),
        (act, (gate,)),
        (up, ("input",)),
        (f"{experts}.mul", (act, up)),
        (down, (f"{experts}.mul",)),
        (f"{experts}.mul#2", (down, "mlp.router.mm")),
    )
    assert {names[value] for value in values_of_module(layer, "moe_act")} == {act, f"{experts}.mul"}


def test_a_weight_before_the_second_product_is_part_of_the_activation_of_experts() -> None:
    """As megatron-core's experts: down(cast(act(gate) * up * weight))."""
    ops = ("mm", "silu", "mul", "mul#1", "_to_copy", "mm#1")
    steps = ["input", *(f"mlp.experts.{op}" for op in ops)]
    layer, names = layer_of(*zip(steps[1:], [(step,) for step in steps], strict=False))
    assert [names[value] for value in sorted(values_of_module(layer, "moe_act"))] == steps[2:6]


def test_a_dense_layer_has_no_activation_of_experts() -> None:
    layer, _ = layer_of(
        ("mlp.gate.mm", ("input",)), ("mlp.act_fn.silu", ("mlp.gate.mm",)), ("mlp.mul", ("mlp.act_fn.silu", "input"))
    )
    assert values_of_module(layer, "moe_act") == frozenset()
