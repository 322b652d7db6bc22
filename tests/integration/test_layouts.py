"""Every layout of `benchmarks/layouts.py` on the fake process group: gradients, peaks and collectives under plans, exactly."""

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from forked_processes import run_forked

ROOT = Path(__file__).parents[2]

# The constant that predictions add for scalars made out of sight, and the loss of the step before, held a little too long.
MOST_OVER_BYTES = 1024 + 8
ONCE, AGAIN = "random", "full, collectives replayed"
# Each kind of collective once; the others are settings of FSDP2 and parts of the pair. And all.
QUICK = ("DDP, bucket views", "FSDP2", "FSDP2+TP+SP", "expert parallel")
# Of rows, by plan.
NUMBERS = {QUICK: {ONCE: 4, AGAIN: 1}, (): {ONCE: 16, AGAIN: 6}}
every_scope = pytest.mark.parametrize(
    "layouts", [QUICK, pytest.param((), marks=pytest.mark.long)], ids=["quick", "all"]
)


@cache
def rows(layouts: tuple[str, ...]) -> list[dict[str, Any]]:
    """The rows of layouts, or of all, in the first rank, as no step had run before it was recorded."""
    only = [word for name in layouts for word in ("--layout", name)]
    done = run_forked(ROOT / "benchmarks/layouts.py", "--json", "--plan", ONCE, "--plan", AGAIN, *only)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def rows_of(plan: str, layouts: tuple[str, ...]) -> list[dict[str, Any]]:
    return [row for row in rows(layouts) if row["plan"] == plan]


@every_scope
@pytest.mark.parametrize("plan", [ONCE, AGAIN])
def test_gradients_are_those_without_a_plan_and_peaks_as_predicted(plan: str, layouts: tuple[str, ...]) -> None:
    rows = rows_of(plan, layouts)
    assert len(rows) == NUMBERS[layouts][plan]
    assert {row["layout"]: row["gradients"] for row in rows if row["gradients"] != "equal"} == {}
    over = {row["layout"]: row["predicted_bytes"] - row["measured_bytes"] for row in rows}
    assert {key: nbytes for key, nbytes in over.items() if not 0 <= nbytes <= MOST_OVER_BYTES} == {}


@every_scope
def test_collectives_run_as_often_as_without_a_plan(layouts: tuple[str, ...]) -> None:
    rows = rows_of(ONCE, layouts)
    assert all(row["collectives"] == row["collectives_with_plan"] for row in rows)
    assert {row["layout"] for row in rows if row["collectives"] == "none"} <= {
        "one process",
        "DDP",
        "DDP, bucket views",
    }


@every_scope
def test_collectives_run_again_as_often_as_predicted(layouts: tuple[str, ...]) -> None:
    for row in rows_of(AGAIN, layouts):
        assert row["predicted_replays"] != "none", row["layout"]
        assert counts(row["collectives_with_plan"]) == counts(row["collectives"]) + counts(row["predicted_replays"])


def counts(text: str) -> Counter[str]:
    """Read "2 all_reduce, 1 broadcast"."""
    return Counter({name: int(count) for count, name in (part.split() for part in text.split(", "))})
