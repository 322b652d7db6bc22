"""Which layer outputs to drop, and how many; and which units a plan then names: those on the tape, and the layers."""

from dataclasses import replace

import pytest

from budgets import least_bytes
from recollect.planning.classic import classic_plan
from recollect.planning.option_table import OptionTable
from recollect.planning.output_choices import first_outputs, longest_chain
from recollect.planning.planners import plan
from recollect.plans.action import Action
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from recollect.profile.graph import PartRecord
from recollect.profile.profile import Profile
from recollect.simulation.decisions import decide
from recollect.simulation.simulate import simulate
from synthetic_step import random_step
from toy_profile import layer, stack


def layers(numbers: list[int]) -> set[str]:
    return {f"layers.{number}" for number in numbers}


@pytest.mark.parametrize(
    ("longest", "num_dropped", "numbers"), [(2, 3, [0, 2, 4]), (3, 3, [0, 1, 3]), (3, 20, [0, 1, 3, 4]), (2, 0, [])]
)
def test_first_outputs(longest: int, num_dropped: int, numbers: list[int]) -> None:
    profile = stack(6)
    assert first_outputs(profile, longest=longest, num_dropped=num_dropped) == layers(numbers)


def least_of_strides(profile: Profile) -> int:
    """The least peak of recomputing everything, with every nth output kept."""
    strides = range(1, longest_chain(profile) + 1)
    return min(classic_plan(profile, "every_nth", stride).predicted_peak_bytes or 0 for stride in strides)


def test_the_least_peak_is_below_that_of_every_stride() -> None:
    gains = []
    for seed in range(3):
        profile = random_step(seed, num_values=7, num_units=10)
        least = least_bytes(profile)
        gains.append(least_of_strides(profile) - least)
        assert simulate(profile, decide(profile, plan(profile, least))).peak_bytes <= least
    assert min(gains) >= 0
    assert sum(gain > 0 for gain in gains) >= 1


@pytest.mark.parametrize(("num_layers", "num_dropped"), [(6, 4), (8, 4)])
def test_segments_at_the_front_are_found_where_they_are_fast(num_layers: int, num_dropped: int) -> None:
    """Three layers at the front share an input; those behind keep their outputs. By hand: cheap ops run again everywhere."""
    profile = stack(num_layers, graph=layer(norm_bytes=50, up_bytes=200, act_bytes=10, out_bytes=1000))
    cheap: dict[str, Action] = {"norm.mul": Action.RECOMPUTE, "mlp.act.silu": Action.RECOMPUTE}
    units = {f"layers.{number}": UnitPlan(cheap) for number in range(num_layers)}
    for path in first_outputs(profile, longest=3, num_dropped=num_dropped):
        units[path] = UnitPlan({**cheap, "mlp.down.mm": Action.RECOMPUTE}, output=Action.RECOMPUTE)
    by_hand = simulate(profile, decide(profile, Plan(units)))
    made = plan(profile, by_hand.peak_bytes)
    assert simulate(profile, decide(profile, made)).recompute_s <= by_hand.recompute_s * (1 + 1e-9)


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
