"""What to compile of a unit: sets of values that are worth a try."""

from dataclasses import replace

import pytest

from recollect.planning.compiled_menu import compiled_menu, keeps_of, with_compiled_costs
from recollect.plans.action import Action
from recollect.profile.graph import OpRecord, UnitGraph, ValueRecord

ATTENTION = "attention._scaled_dot_product_flash_attention"

# A transformer layer: name of the op, what it reads, bytes of each result, seconds.
LAYER: list[tuple[str, tuple[int, ...], tuple[int, ...], float]] = [
    ("norm.pow", (0,), (100,), 0.1),
    ("norm.mean", (1,), (1,), 0.1),
    ("norm.mul", (0, 2), (100,), 0.1),
    ("attention.q.mm", (3,), (100,), 1.0),
    ("attention.mul", (4,), (100,), 0.1),
    ("attention.mul#1", (4,), (100,), 0.1),
    ("attention.add", (5, 6), (100,), 0.1),
    (ATTENTION, (7,), (100, 4), 2.0),
    ("attention.out.mm", (8,), (100,), 1.0),
    ("add", (0, 10), (100,), 0.1),
    ("mlp.up.mm", (11,), (400,), 4.0),
    ("mlp.act.silu", (12,), (400,), 0.1),
    ("mlp.down.mm", (13,), (100,), 4.0),
    ("add#1", (11, 14), (100,), 0.1),
]


def layer(ops: list[tuple[str, tuple[int, ...], tuple[int, ...], float]] = LAYER) -> UnitGraph:
    values, records = [ValueRecord("input 0", 100, producer=None)], list[OpRecord]()
    for name, inputs, sizes, time_s in ops:
        outputs = tuple(range(len(values), len(values) + len(sizes)))
        for index, nbytes in enumerate(sizes):
            full = name if len(sizes) == 1 else f"{name}.{index}"
            values.append(ValueRecord(full, nbytes, producer=len(records), saved=True))
        records.append(OpRecord(name, inputs, outputs, time_s))
    values[-1] = replace(values[-1], is_output=True)
    return UnitGraph(tuple(values), tuple(records))


def kept(keeps: dict[str, Action]) -> set[str]:
    return {name for name, action in keeps.items() if action == Action.KEEP} - {"add#1"}


def bytes_of(names: set[str]) -> int:
    return sum(value.nbytes for value in layer().values if value.name in names)


def test_the_menu_has_sets_as_large_as_those_that_people_choose_by_hand() -> None:
    menu = [kept(dict(keeps)) for keeps in compiled_menu(layer())]
    attention = {f"{ATTENTION}.0", f"{ATTENTION}.1"}
    products = {"attention.q.mm", "attention.out.mm", "mlp.up.mm", "mlp.down.mm"}
    assert set() in menu
    for expected in (attention, attention | {"add"}, attention | products):
        assert any(abs(bytes_of(keeps) - bytes_of(expected)) <= 4 for keeps in menu)


def test_of_sets_with_nearly_the_same_bytes_one_is_compiled() -> None:
    tiny = [(f"{name}.rsqrt", (0,), (1,), 5.0) for name in ("norm", "other")]  # Worth their bytes, by these costs.
    small, plain = compiled_menu(layer([*LAYER, *tiny])), compiled_menu(layer())
    assert len(small) == len(plain)
    for menu in (small, plain):
        sizes = [bytes_of(kept(dict(keeps))) for keeps in menu]
        assert all(later - sooner > 2 for sooner, later in zip(sizes, sizes[1:], strict=False))


def test_the_menu_has_what_is_cheapest_to_keep_for_each_second() -> None:
    # Of the products, up takes four times the time and bytes of q; attention is most worth its bytes.
    menu = [kept(dict(keeps)) for keeps in compiled_menu(layer())]
    assert any("mlp.up.mm" in keeps and "norm.mul" not in keeps and "mlp.act.silu" not in keeps for keeps in menu)
    assert 4 <= len(menu) <= 10


def test_an_entry_names_every_value_of_the_unit_in_forward_order() -> None:
    graph = layer()
    for keeps in compiled_menu(graph):
        assert list(keeps) == [value.name for value in graph.values if value.producer is not None]
        assert keeps["add#1"] == Action.KEEP


def test_what_cannot_run_again_is_kept_in_every_entry() -> None:
    graph = layer()
    values = tuple(replace(value, must_keep=value.name == "norm.mean") for value in graph.values)
    assert all(keeps["norm.mean"] == Action.KEEP for keeps in compiled_menu(replace(graph, values=values)))


def test_a_unit_without_attention_has_a_menu() -> None:
    (keeps,) = compiled_menu(layer([("mlp.silu", (0,), (100,), 0.1)]))
    assert dict(keeps) == {"mlp.silu": Action.KEEP}  # It is what the unit returns.


def test_compiled_costs_of_pointwise_ops_are_near_zero_of_reductions_their_bytes_of_products_as_recorded() -> None:
    graph = replace(layer(), tape_s=1.0, module_tape_s=(("mlp", 1.0),))
    found = with_compiled_costs(graph)
    times = {op.name: op.time_s for op in found.ops}
    assert times["mlp.up.mm"] == 4.0
    assert times[ATTENTION] == 2.0
    # The silu moves 800 bytes in 0.1 s, which is the fastest of the light ops.
    assert times["norm.mean"] == pytest.approx(100 * 0.1 / 800)
    assert times["mlp.act.silu"] == pytest.approx(0.02 * 400 * 0.1 / 800)
    assert (found.tape_s, found.module_tape_s) == (0.0, ())


@pytest.mark.parametrize("name", ["mlp.liger:swiglu", "mlp.FusedNorm"])
def test_what_the_compiler_cannot_see_into_costs_what_it_costs(name: str) -> None:
    times = {op.name: op.time_s for op in with_compiled_costs(layer([(name, (0,), (100,), 3.0)])).ops}
    assert times[name] == 3.0


def test_all_that_is_not_kept_is_dropped() -> None:
    keeps = keeps_of(layer(), [4])
    assert [name for name, action in keeps.items() if action == Action.KEEP] == ["attention.q.mm", "add#1"]
