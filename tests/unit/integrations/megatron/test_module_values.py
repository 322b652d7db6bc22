"""Which values of a layer a module of Megatron stands for, on graphs made by hand."""

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
def test_products_before_the_one_down_are_part_of_the_activation_of_experts(experts: str) -> None:
    """As in megatron-core, down(cast(act(gate) * up * weight)), and in Hugging Face, down(act(gate) * up) * weight."""
    gate, up, act, down = (f"{experts}.{name}" for name in ("gate.mm", "up.mm", "act_fn.silu", "down.mm"))
    layer, names = layer_of(
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
    found = {names[value].removeprefix(experts) for value in values_of_module(layer, "moe_act")}
    assert found == {".act_fn.silu", ".mul", ".mul#1", "._to_copy"}


def test_a_dense_layer_has_no_activation_of_experts() -> None:
    layer, _ = layer_of(
        ("mlp.gate.mm", ("input",)), ("mlp.act_fn.silu", ("mlp.gate.mm",)), ("mlp.mul", ("mlp.act_fn.silu", "input"))
    )
    assert values_of_module(layer, "moe_act") == frozenset()
