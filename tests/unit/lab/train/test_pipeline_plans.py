"""The plans of a pipeline's stages as a file: read back as they were, and said where it is damaged."""

import json
import re
from pathlib import Path

import pytest

from recollect.errors import MissingFileError, PlanFormatError
from recollect.lab.train.pipeline_plans import PipelinePlans
from recollect.plans.action import Action
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan

LEAN = Plan(units={"decoder.layers.0": UnitPlan(actions={"mlp.mm": Action.RECOMPUTE})})
PLANS = PipelinePlans(
    stages=((LEAN,), (LEAN, Plan(units={}))),
    budget_bytes=4096,
    predicted_peak_bytes=4000,
    predicted_slowdown=0.125,
    plain_peak_bytes=8192,
    table="rank 0",
)


def test_plans_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "pipeline_plans.json"
    path.write_text(PLANS.to_json())
    assert PipelinePlans.load(path) == PLANS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": None}, "stages: got null, expected an array"),
        ({"stages": [[{"format": "recollect.plan"}]]}, "stages[0][0]: document: the key 'version' is missing"),
        ({"table": 3}, "table: got 3, expected a string"),
        ({"budget_bytes": -1}, "budget_bytes: got -1, expected an integer, 0 or more"),
        ({"format": "recollect.plan"}, "format: got \"recollect.plan\", expected 'recollect.pipeline_plans'"),
        ({"extra": 1}, "extra: unknown key, expected one of format, version, stages,"),
    ],
)
def test_a_damaged_file_is_named_and_where(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "pipeline_plans.json"
    path.write_text(json.dumps(json.loads(PLANS.to_json()) | changes))
    with pytest.raises(PlanFormatError, match=re.escape(f"{path}: {message}")):
        PipelinePlans.load(path)


def test_what_is_no_file_of_plans_is_named(tmp_path: Path) -> None:
    path = tmp_path / "pipeline_plans.json"
    with pytest.raises(MissingFileError, match="no such file, expected the plans of a pipeline"):
        PipelinePlans.load(path)
    path.write_text("{")
    with pytest.raises(PlanFormatError, match=rf"{re.escape(str(path))}: line 1, column 2: not JSON"):
        PipelinePlans.load(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(PlanFormatError, match="can't decode"):
        PipelinePlans.load(path)
