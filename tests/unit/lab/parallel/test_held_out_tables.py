"""The published tables that `benchmarks/held_out_tables.py` predicts: models and layouts are those of the tables."""

import csv
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[4] / "benchmarks"))

from held_out_tables import MODELS, REASONS, ROWS, TABLES, published_step_s, step_of  # noqa: E402

COUNTS = {"mpt-7b": 6_658_859_008, "mpt-13b": 12_853_954_560, "mpt-30b": 29_975_214_080, "mpt-70b": 64_862_437_376}


@pytest.mark.parametrize("name", COUNTS)
def test_models_have_as_many_parameters_as_the_table_says(name: str) -> None:
    assert MODELS[name].num_parameters == COUNTS[name]


def test_each_row_is_a_step_of_a_table() -> None:
    with ROWS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["table"] for row in rows} == TABLES.keys()
    for row in rows:
        step = step_of(row)
        assert step.layout.num_devices == int(row["devices"])
        assert (row["tokens_per_s"] == "") is (row["step_s"] != "")
        assert published_step_s(row, step) > 0
        assert set(row["reason"]) <= REASONS.keys()


def test_tokens_of_a_sequence_are_shared_by_the_ranks_that_have_parts_of_it() -> None:
    """8 ranks, 548 tokens a second each, for one sequence of 262,144."""
    with ROWS.open(encoding="utf-8", newline="") as file:
        row = next(row for row in csv.DictReader(file) if row["row"] == "CP 8 of 262144")
    assert published_step_s(row, step_of(row)) == pytest.approx(262_144 / 8 / 548)
