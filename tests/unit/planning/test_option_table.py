"""Which units a plan names: those that have to be on the tape, and the layers."""

from dataclasses import replace

import pytest

from recollect.planning.option_table import OptionTable
from recollect.profile.graph import PartRecord
from toy_profile import layer, stack

LAYERS = ["layers.0", "layers.1", "layers.2"]


@pytest.mark.parametrize(("dropped", "readers"), [("layers.2", ["head"]), ("layers.1", []), ("embed", [])])
def test_who_reads_a_dropped_output_is_named_though_it_keeps_everything(dropped: str, readers: list[str]) -> None:
    table = OptionTable(stack(3), dropped_outputs={dropped})
    made = table.plan(table.fattest)
    assert [path for path in made.units if path != "embed"] == [*LAYERS, *readers]
    assert [path for path, unit in made.units.items() if unit.output == "recompute"] == [dropped]
    assert not any(unit.recomputes_anything for path, unit in made.units.items() if path != dropped)


def test_units_beside_the_layers_are_not_named_where_all_outputs_are_kept() -> None:
    table = OptionTable(stack(3))
    assert list(table.plan(table.fattest).units) == LAYERS


def test_who_reads_an_output_that_is_kept_as_a_part_is_named() -> None:
    graph = replace(layer(), parts=(PartRecord(4, 25, 0.01),))
    table = OptionTable(replace(stack(3, graph=graph), shard_ranks=2))
    in_parts = [
        next(o for o in row.options if 4 in o.stored.parts) if row.path in LAYERS else row.options[-1]
        for row in table.rows
    ]
    assert [decision.is_planned for decision in table.decisions_of(in_parts)] == [False, True, True, True, True]
