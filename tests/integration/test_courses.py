"""Loops whose steps change their course at equal shapes: training is the same, and no step is over its budget in silence."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from forked_processes import HAS_METER, run_forked  # noqa: E402

# Each by the cheapest model that shows it; `python benchmarks/real_loops.py` runs them all, at all budgets.
_LOOPS = [
    "layers dropped, 20 %",
    "early exit",
    "random recurrent depth",
    "one of two branches",
    "work by argument",
    "heads in turn",
    "work by attribute",
    "hooks put on",
    "hooks switched on",
    "penalty in every second step",
    "a second call in every third step",
    "two backwards in every third step",
    "layers added",
    "tensors of some steps kept",
    "an optimizer that is replaced",
]
# So many steps are learned from at most, and so many may be over while they are.
_MOST_RECORDED = 6
_MOST_OVER = 2
# What only the allocator tells is looked for in every fourth step.
_READ = {"work by attribute", "hooks switched on", "tensors of some steps kept"}
_MOST_UNSEEN = 4

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not HAS_METER, reason="the meter is built by a C compiler on Linux"),
]


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    """Each loop within a budget half way between its least and its peak without recollect, all in one process."""
    done = run_forked(BENCHMARKS / "real_loops.py", "--json", "--budgets", "half way", "--loops", *_LOOPS)
    assert done.returncode == 0, done.stderr
    return {row["loop"]: row for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", _LOOPS)
def test_a_course_that_changes_is_followed_or_said(rows: dict[str, dict[str, Any]], name: str) -> None:
    row = rows[name]
    print(row)
    assert row["weights_equal"]
    assert row["plain_bytes"] > row["budget_bytes"]
    unseen = _MOST_UNSEEN if name in _READ else 0
    assert len(row["silent_overruns"]) <= unseen
    assert len(row["overruns"]) <= _MOST_OVER + unseen
    assert row["num_recorded"] <= _MOST_RECORDED
