"""How often units are timed: long ones rarely, short ones often, and all processes alike."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import recollect
from recollect.recording.unit_samples import UnitSamples
from recollect.recording.unit_times import TOGETHER, Rounds, UnitTimes, measure_unit_times, rounds_for, with_unit_times
from recollect.simulation.decisions import drop_all
from recollect.simulation.simulate import simulate
from small_llama import batch_of, llama

CPU = torch.device("cpu")
LONG = Rounds(2, warms_up=False, has_idle=False)
SHORT = Rounds(7, warms_up=True, has_idle=True)


def test_a_long_layer_is_timed_twice_and_a_short_one_often() -> None:
    assert rounds_for(0.17, num_ops=74, num_calls=6) == LONG
    assert rounds_for(0.17, num_ops=74, num_calls=96) == LONG
    assert rounds_for(0.002, num_ops=74, num_calls=6) == SHORT
    assert rounds_for(0.0, num_ops=0, num_calls=1) == SHORT


def test_where_the_first_run_allocates_it_does_not_count() -> None:
    rounds = rounds_for(0.17, num_ops=74, num_calls=6, allocates=True)
    assert rounds == Rounds(2, warms_up=True, has_idle=False)


def test_a_head_of_one_long_op_is_not_timed() -> None:
    assert rounds_for(0.3, num_ops=4, num_calls=1).number == 0
    assert rounds_for(0.3, num_ops=400, num_calls=1) == Rounds(1, warms_up=False, has_idle=False)
    assert rounds_for(0.3, num_ops=4, num_calls=2).number == 1, "a layer"


@given(
    unit_s=st.floats(1e-6, 10.0),
    num_ops=st.integers(0, 1000),
    num_calls=st.integers(1, 100),
)
def test_rounds_take_at_most_a_quarter_of_a_second_or_about_their_part_of_the_step(
    unit_s: float, num_ops: int, num_calls: int
) -> None:
    rounds = rounds_for(unit_s, num_ops=num_ops, num_calls=num_calls)
    round_s = (3.4 if rounds.has_idle else 2.4) * unit_s
    total_s = (rounds.number + rounds.warms_up) * round_s
    assert total_s <= max(0.25, num_calls * unit_s) * (1 + 1e-9) or rounds.number == 1
    assert rounds.number >= 3 or not rounds.has_idle


class Counting(nn.Module):
    """Counts the runs of all its copies."""

    runs = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        type(self).runs += 1
        return self.linear(hidden)


@pytest.mark.parametrize(
    ("rounds", "runs"),
    [(Rounds(0, warms_up=False, has_idle=False), 0), (LONG, 4), (TOGETHER, 12)],
)
def test_units_run_as_often_as_they_are_told(rounds: Rounds, runs: int) -> None:
    samples = UnitSamples(nn.Sequential(Counting()), CPU)
    samples.take("0", 0, (torch.randn(4, 8),), {})
    Counting.runs = 0
    times = measure_unit_times(samples.samples, CPU, rounds=lambda _: rounds)
    assert Counting.runs == runs
    assert list(times) == ([0] if runs else [])
    if runs == 4:
        assert times[0].idle_s == 0.0


def test_processes_that_train_together_run_units_equally_often(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Rounds] = []

    def note(samples: object, _device: object, **options: object) -> dict[int, UnitTimes]:
        found.extend(options["rounds"](sample) for sample in samples)  # type: ignore[attr-defined, operator]
        return {}

    monkeypatch.setattr("recollect.recording.step_recording.measure_unit_times", note)
    recollect.record(llama(), batch_of())
    assert SHORT in found
    found.clear()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        recollect.record(llama(), batch_of())
    finally:
        torch.distributed.destroy_process_group()
    assert set(found) == {TOGETHER}


def test_what_needs_no_timing_does_not_keep_others_from_counting() -> None:
    profile = recollect.record(llama(), batch_of())
    bare = replace(profile, graphs=tuple(replace(graph, tape_s=0.0, module_tape_s=()) for graph in profile.graphs))
    layer = next(call.graph for call in bare.calls if call.repeated)
    head = bare.calls[-1].graph
    # The head takes most of forward.
    graphs = list(bare.graphs)
    graphs[head] = replace(graphs[head], ops=tuple(replace(op, time_s=100.0) for op in graphs[head].ops))
    bare = replace(bare, graphs=tuple(graphs))
    leanest = simulate(bare, [drop_all(bare.graph_of(call)) for call in bare.calls])
    first = next(index for index, call in enumerate(bare.calls) if call.graph == layer)
    times = {first: UnitTimes(1.0, 2.0, 1.0, 1002.0, 1.0)}
    for known, counts in (((), False), ((head,), True)):
        timed = with_unit_times(
            bare, times, seen_ops={}, backward_s=[0.0] * len(bare.calls), leanest=leanest, known=known
        )
        assert (timed.graphs[layer].ops[0].time_s > bare.graphs[layer].ops[0].time_s) == counts
