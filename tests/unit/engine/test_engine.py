"""Engines: each choice of a plan has a word, code that carries it out, and a place in JSON."""

from __future__ import annotations

import json
from typing import get_args

import pytest

from recollect.engine.tape_engine import ENGINES
from recollect.plans.engines import ENGINE_WORDS, EngineChoice, Region, Tape, engine_choice
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan

CHOICES = get_args(EngineChoice)


def test_every_choice_has_an_engine() -> None:
    assert set(ENGINES) == set(CHOICES)
    assert len(set(ENGINES.values())) == len(CHOICES)


def test_every_choice_has_a_word() -> None:
    assert tuple(choice.word for choice in CHOICES) == ENGINE_WORDS == ("tape", "region")
    assert [str(engine_choice(word)) for word in ENGINE_WORDS] == list(ENGINE_WORDS)


@pytest.mark.parametrize("choice", CHOICES)
def test_word_and_choice_make_equal_units(choice: type[EngineChoice]) -> None:
    by_word = UnitPlan({"mm": "keep"}, engine=choice.word)
    assert by_word == UnitPlan({"mm": "keep"}, engine=choice())
    assert isinstance(by_word.engine, choice)


@pytest.mark.parametrize("choice", CHOICES)
def test_json_has_the_word(choice: type[EngineChoice]) -> None:
    plan = Plan({"layers.0": UnitPlan({}, engine=choice())})
    assert json.loads(plan.to_json())["units"][0]["engine"] == choice.word
    assert Plan.from_json(plan.to_json()) == plan


def test_units_with_different_engines_differ() -> None:
    assert UnitPlan({}, engine=Region()) != UnitPlan({}, engine=Tape())
    assert UnitPlan({}, engine=Region()).recomputes_anything and not UnitPlan({}, engine=Tape()).recomputes_anything
