"""What ranks tell each other about their plans: whether they are the same, and whether each needs the others for its own."""

import pytest

from recollect.plans.unit_plan import UnitPlan, digest_of, needs_all_ranks

LAYER = UnitPlan({"up.mm": "keep", "act.gelu": "recompute"})
GATHERS = "up._c10d_functional:all_gather_into_tensor"


@pytest.mark.parametrize(
    "other",
    [
        UnitPlan({"up.mm": "keep", "act.gelu": "keep"}),
        UnitPlan({"up.mm": "keep", "act.gelu": "shard"}),
        UnitPlan({"up.mm": "keep", "act.gelu": "recompute"}, output="recompute"),
        UnitPlan({}, engine="compile"),
    ],
    ids=["value", "part", "output", "engine"],
)
def test_plans_that_do_something_else_are_not_the_same(other: UnitPlan) -> None:
    assert digest_of({"layers.0": LAYER}) != digest_of({"layers.0": other})
    assert digest_of({"layers.0": LAYER}) == digest_of(
        {"layers.0": UnitPlan({"act.gelu": "recompute", "up.mm": "keep"})}
    )


def test_the_same_units_with_another_number_of_chunks_are_not_the_same_plan() -> None:
    assert digest_of({"layers.0": LAYER}, 4) != digest_of({"layers.0": LAYER}, 1) == digest_of({"layers.0": LAYER})


@pytest.mark.parametrize(
    ("actions", "is_needed"),
    [
        ({"up.mm": "recompute", GATHERS: "keep"}, False),
        ({GATHERS: "recompute"}, True),
        ({"up.mm": "shard"}, True),
    ],
    ids=["alone", "collective", "part"],
)
def test_a_rank_needs_the_others_to_repeat_a_collective_and_to_gather_parts(
    actions: dict[str, str], is_needed: bool
) -> None:
    assert needs_all_ranks({"layers.0": LAYER, "layers.1": UnitPlan(actions)}) == is_needed
