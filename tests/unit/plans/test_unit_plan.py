"""Actions are their words, wherever people and files write them; and what ranks tell each other about their plans."""

import copy
import json
import pickle

import pytest

from recollect.plans.action import Action
from recollect.plans.plan import Plan
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


@pytest.mark.parametrize("action", Action)
def test_prints_and_writes_its_word(action: Action) -> None:
    word = action.value
    assert action == word and hash(action) == hash(word)
    assert (str(action), f"{action}", f"{action:>10}", "%s" % action) == (word, word, f"{word:>10}", word)  # noqa: UP031
    assert json.loads(json.dumps({word: action})) == {word: word}


@pytest.mark.parametrize("action", Action)
def test_stays_itself_when_copied(action: Action) -> None:
    assert pickle.loads(pickle.dumps(action)) is copy.deepcopy(action) is Action(action) is action


def test_plans_take_words_and_hold_actions() -> None:
    by_word = UnitPlan({"mm": "recompute", "add": "keep"}, output="recompute")
    by_action = UnitPlan({"mm": Action.RECOMPUTE, "add": Action.KEEP}, output=Action.RECOMPUTE)
    for unit in (by_word, by_action, Plan.from_json(Plan({"a": by_word}).to_json()).units["a"]):
        assert unit == by_action and hash(unit) == hash(by_action)
        assert {type(action) for action in (*unit.actions.values(), unit.output)} == {Action}


def test_json_has_words() -> None:
    document = json.loads(Plan({"a": UnitPlan({"mm": Action.RECOMPUTE})}).to_json())
    assert document["units"] == [{"paths": ["a"], "engine": "tape", "output": "keep", "values": {"mm": "recompute"}}]
