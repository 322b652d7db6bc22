"""Training loops as people write them, and whose steps change their course, keep to their budgets or say so."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from asked_cases import AskedCases  # noqa: E402
from forked_processes import HAS_METER, run_forked  # noqa: E402
from loops import one_model, several_calls  # noqa: E402, F401, they enter their loops
from loops.loop import LOOPS  # noqa: E402
from metered_processes import metered  # noqa: E402
from tiers import long_but  # noqa: E402

# The others differ only in how many micro-batches make a step; the benchmark runs them.
_PLAIN_LOOPS = [name for name in LOOPS if name not in ("accumulation of 1", "accumulation of 2", "accumulation of 8")]
_QUICK_LOOPS = ["output held", "bf16 autocast"]
# The tightest that holds in every step: at the least peak itself, the recorded step may need more, because it also times
# single units. The benchmark runs that one, too, and budgets with more room.
_BUDGET = "near the least"
# Three steps of four micro-batches, two of the smaller last batches, and each length once; the benchmark runs 30.
_NUM_BATCHES = 12

pytestmark = pytest.mark.skipif(not HAS_METER, reason="the meter is built by a C compiler on Linux")


@pytest.mark.parametrize("name", long_but(_QUICK_LOOPS, _PLAIN_LOOPS))
def test_every_step_is_within_the_budget_and_training_is_the_same(name: str) -> None:
    few = ["--batches", _NUM_BATCHES]
    done = run_forked(BENCHMARKS / "real_loops.py", "--json", "--budgets", _BUDGET, *few, "--loops", name)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    print(row)
    assert row["budget"] == _BUDGET and row["num_batches"] == _NUM_BATCHES
    assert row["weights_equal"]
    assert row["unsaid_overruns"] == []
    assert row["peak_bytes"] <= row["budget_bytes"] < row["plain_bytes"]


_PROGRAM = """
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
import recollect
from allocator_meter import AllocatorMeter
from recollect.measuring.deaths import reachable_storages

torch.set_num_threads(1)
meter = AllocatorMeter()
block = torch.zeros(1000)
assert meter.now_bytes() == 4000
del block
assert (meter.now_bytes(), meter.peak_bytes()) == (0, 4000)
net = nn.Sequential(*[nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(3)])
images = torch.randn(4, 16, 32)

def step():
    net(images).square().mean().backward()

step()
def metered(run):
    before = meter.now_bytes()
    meter.restart()
    found = run()
    return meter.peak_bytes() - before, found

alone, _ = metered(step)
# It gives each storage that is alive a byte, whose end is seen among the allocator's events.
num_alive = len(reachable_storages())
inside, measured = metered(lambda: recollect.measure_peak(step, device="cpu"))
with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
    step()
now = peak = 0
for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
    if event.name() == "[memory]":
        now += event.nbytes()
        peak = max(peak, now)
print(alone, inside - num_alive, measured.peak_growth_bytes, peak)
"""


def test_meter_agrees_with_the_profiler_and_with_measure_peak(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM, encoding="utf-8")
    done = run_forked(program)
    assert done.returncode == 0, done.stderr
    found = {int(peak) for peak in done.stdout.split()}
    assert len(found) == 1 and found.pop() > 100_000, done.stdout


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
