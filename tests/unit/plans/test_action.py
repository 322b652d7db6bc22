"""Actions are their words, wherever people and files write them."""

import copy
import json
import pickle

import pytest

from recollect.plans.action import Action
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan


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
