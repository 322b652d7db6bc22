"""Loops whose steps change their course at equal shapes: training is the same, and no step is over its budget in silence."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from asked_cases import AskedCases  # noqa: E402
from forked_processes import HAS_METER, run_forked  # noqa: E402
from metered_processes import metered  # noqa: E402
from tiers import long_but  # noqa: E402

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
# What a plan cannot foresee, what only the allocator tells, and what takes the handle's place.
_QUICK = ["layers dropped, 20 %", "work by attribute", "an optimizer that is replaced"]
# So many steps are learned from at most, and so many may be over while they are.
_MOST_RECORDED = 6
_MOST_OVER = 2
# What only the allocator tells is looked for in every fourth step.
_READ = {"work by attribute", "hooks switched on", "tensors of some steps kept"}
_MOST_UNSEEN = 4

pytestmark = pytest.mark.skipif(not HAS_METER, reason="the meter is built by a C compiler on Linux")


@pytest.mark.parametrize("name", long_but(_QUICK, _LOOPS))
def test_a_course_that_changes_is_followed_or_said(name: str) -> None:
    """Within a budget half way between the least and the peak without recollect."""
    done = run_forked(BENCHMARKS / "real_loops.py", "--json", "--budgets", "half way", "--loops", name)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    print(row)
    assert row["weights_equal"]
    assert row["plain_bytes"] > row["budget_bytes"]
    unseen = _MOST_UNSEEN if name in _READ else 0
    assert len(row["silent_overruns"]) <= unseen
    assert len(row["overruns"]) <= _MOST_OVER + unseen
    assert row["num_recorded"] <= _MOST_RECORDED


@pytest.fixture(scope="module")
def cases() -> Iterator[AskedCases]:
    """In each, two processes assert that they recorded the same steps."""
    with metered("course_ranks", num_ranks=2) as found:
        yield found


@pytest.mark.parametrize(
    ("name", "ranks_over"),
    [("deeper in one, DDP", {1}), pytest.param("deeper in both, FSDP2", {0, 1}, marks=pytest.mark.long)],
)
def test_a_departure_in_one_process_is_planned_for_in_all(cases: AskedCases, name: str, ranks_over: set[int]) -> None:
    for rank, row in enumerate(cases[name]):
        print(row)
        assert row["weights_equal"]
        # The steps that the first plan was made for, and one at the next exchange after the course has changed.
        assert row["recorded_steps"] == 2
        over = [number for number, peak in enumerate(row["peaks_bytes"]) if peak > row["budget_bytes"]]
        assert over == ([12] if rank in ranks_over else []), (
            "from its first departure on, a process is lean until all ask"
        )
        assert len(row["warnings"]) == len(over)
        assert all(text.startswith("recollect: step 12 ran unit") for text in row["warnings"])
