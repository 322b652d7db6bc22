"""Engines: each choice of a plan has a word, code that carries it out, and a place in JSON."""

import json

import pytest

from recollect.engine.tape_engine import ENGINES
from recollect.plans.action import EngineChoice
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan

CHOICES = tuple(EngineChoice)


def test_every_choice_has_an_engine() -> None:
    assert set(ENGINES) == set(CHOICES)
    assert len(set(ENGINES.values())) == len(CHOICES)


def test_every_choice_has_a_word() -> None:
    assert [str(choice) for choice in CHOICES] == ["tape", "graph", "compile"]
    assert [UnitPlan({}, engine=str(choice)).engine for choice in CHOICES] == list(CHOICES)
    assert len({UnitPlan({}, engine=choice) for choice in CHOICES}) == len(CHOICES)


@pytest.mark.parametrize("choice", CHOICES)
def test_json_has_the_word(choice: EngineChoice) -> None:
    plan = Plan({"layers.0": UnitPlan({}, engine=choice)})
    assert json.loads(plan.to_json())["units"][0]["engine"] == str(choice)
    assert Plan.from_json(plan.to_json()) == plan
