"""Every layout of `benchmarks/layouts.py` on the fake process group: gradients, peaks and collectives under plans, exactly."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from forked_processes import run_forked

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.integration

# The constant that predictions add for scalars made out of sight, and the loss of the step before, held a little too long.
MOST_OVER_BYTES = 1024 + 8
ONCE, AGAIN = "random", "full, collectives replayed"
# Of layouts.
NUMBERS = {ONCE: 16, AGAIN: 6}


@cache
def rows() -> list[dict[str, Any]]:
    """The rows of all layouts in the first rank, as no step had run before it was recorded."""
    done = run_forked(ROOT / "benchmarks/layouts.py", "--json", "--plan", ONCE, "--plan", AGAIN)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def rows_of(plan: str) -> list[dict[str, Any]]:
    return [row for row in rows() if row["plan"] == plan]


@pytest.mark.parametrize(("plan", "number"), NUMBERS.items())
def test_gradients_are_those_without_a_plan_and_peaks_as_predicted(plan: str, number: int) -> None:
    rows = rows_of(plan)
    assert len(rows) == number
    assert {row["layout"]: row["gradients"] for row in rows if row["gradients"] != "equal"} == {}
    over = {row["layout"]: row["predicted_bytes"] - row["measured_bytes"] for row in rows}
    assert {key: nbytes for key, nbytes in over.items() if not 0 <= nbytes <= MOST_OVER_BYTES} == {}


def test_collectives_run_as_often_as_without_a_plan() -> None:
    rows = rows_of(ONCE)
    assert all(row["collectives"] == row["collectives_with_plan"] for row in rows)
    assert {row["layout"] for row in rows if row["collectives"] == "none"} <= {
        "one process",
        "DDP",
        "DDP, bucket views",
    }


def test_collectives_run_again_as_often_as_predicted() -> None:
    for row in rows_of(AGAIN):
        assert row["predicted_replays"] != "none", row["layout"]
        assert counts(row["collectives_with_plan"]) == counts(row["collectives"]) + counts(row["predicted_replays"])


def counts(text: str) -> Counter[str]:
    """Read "2 all_reduce, 1 broadcast"."""
    return Counter({name: int(count) for count, name in (part.split() for part in text.split(", "))})
