"""Schedules: what is in flight, what torch writes, what cannot run, and how long a step takes."""

from collections.abc import Mapping, Sequence

import pytest

from recollect.errors import ConfigError, ScheduleError
from recollect.pipelines.rank import first_actions
from recollect.pipelines.schedule import PipelineSchedule, played_s, schedule_of


def step_s(schedule: PipelineSchedule, times: Sequence[Mapping[str, float]], *, send_s: float = 0.0) -> float:
    return played_s(schedule, lambda action: times[action.stage][action.kind], send_s=send_s)


def in_flight_of_ranks(schedule: PipelineSchedule) -> list[int]:
    """The most micro-batches in flight on each rank, over all its stages."""
    most = []
    for actions in schedule.ranks:
        alive = [0]
        for action in actions:
            alive.append(alive[-1] + (1 if action.kind == "F" else -1))
        most.append(max(alive))
    return most


def test_as_many_are_in_flight_as_torch_has() -> None:
    # Counted from torch's own lists for four ranks and eight micro-batches.
    assert in_flight_of_ranks(PipelineSchedule.gpipe(num_stages=4, num_micro_batches=8)) == [8, 8, 8, 8]
    assert in_flight_of_ranks(PipelineSchedule.one_f_one_b(num_stages=4, num_micro_batches=8)) == [4, 3, 2, 1]
    assert in_flight_of_ranks(
        PipelineSchedule.interleaved_1f1b(num_ranks=4, stages_per_rank=2, num_micro_batches=8)
    ) == [11, 9, 7, 5]
    assert in_flight_of_ranks(PipelineSchedule.one_f_one_b(num_stages=4, num_micro_batches=2)) == [2, 2, 2, 1]


def test_what_torch_writes_is_read() -> None:
    rows = {
        1: ["1RECV_F0", "(1F0;1B0)OVERLAP_F_B", "1SEND_B0"],
        0: ["0UNSHARD", "0F0", None, "", "0B0", "0REDUCE_GRAD"],
    }
    assert schedule_of(rows).ranks == schedule_of([["0F0", "0B0"], ["1F0", "1B0"]]).ranks


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([["0F0", "0B0"], ["0F1", "0B1"]], "stage 0 runs on ranks 0 and 1, expected one"),
        ([["0F0", "0B0"], ["2F0", "2B0"]], r"the schedule has stages \[0, 2\], expected 0, 1, 2"),
        ([[]], "the schedule has stages"),
        ([["0F0", "0B0", "0F1", "0B1"], ["1F0", "1B0"]], r"stage 1 runs micro-batches \[0\], and stage 0 \[0, 1\]"),
        ([["0F0", "0F0", "0B0"]], "rank 0 runs 0F0 twice, expected once"),
        ([["0B0", "0F0"]], "rank 0 runs 0B0 before 0F0"),
        ([["0F0", "0W0", "0I0"]], "rank 0 runs 0W0 before 0I0"),
        ([["0F0"]], "rank 0 runs 0F0 and no backward of it, expected 0B0, or 0I0 and 0W0"),
        ([["0F0", "0I0"]], "rank 0 runs 0F0 and 0I0, expected 0B0, or 0I0 and 0W0"),
        ([["0F0", "zero"]], "got the action 'zero', expected stage, F, B, I or W, and micro-batch, such as '0F2'"),
        ("1F1B", "got an object of class str as schedule, expected a PipelineSchedule"),
    ],
)
def test_what_cannot_run_is_an_error(rows: object, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        schedule_of(rows)


def test_halves_of_a_backward_are_in_flight_until_the_second() -> None:
    schedule = schedule_of([["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"], ["1F0", "1B0", "1F1", "1I1", "1W1"]])
    assert schedule.most_in_flight(0) == 2 and schedule.most_in_flight(1) == 1
    assert schedule.backwards_of(0) == {"I"} and schedule.backwards_of(1) == {"B", "I"}
    held = first_actions(schedule.ranks[0])
    assert held == schedule.ranks[0]


def test_a_forward_between_the_halves_of_a_backward_has_two_in_flight() -> None:
    schedule = schedule_of([["0F0", "0I0", "0F1", "0W0", "0I1", "0W1"]])
    assert schedule.most_in_flight(0) == 2


def test_only_the_first_half_of_a_backward_is_waited_for() -> None:
    schedule = schedule_of([["0F0", "0I0", "0W0"], ["1F0", "1I0", "1W0"]])
    times = [{"F": 1.0, "I": 2.0, "W": 4.0}] * 2
    # Both second halves run at the same time but for the first half of stage 0.
    assert step_s(schedule, times) == 1.0 + 1.0 + 2.0 + 2.0 + 4.0


def test_counts_are_checked() -> None:
    with pytest.raises(ConfigError, match="num_stages"):
        PipelineSchedule.gpipe(num_stages=0, num_micro_batches=1)
    with pytest.raises(ConfigError, match="Use a multiple of 4"):
        PipelineSchedule.interleaved_1f1b(num_ranks=4, stages_per_rank=2, num_micro_batches=6)


@pytest.mark.parametrize("made", [PipelineSchedule.gpipe, PipelineSchedule.one_f_one_b])
def test_equal_stages_take_the_time_of_the_textbook(made: object) -> None:
    # (micro-batches + stages - 1) times forward and backward: Huang et al. 2019, Narayanan et al. 2021.
    schedule = made(num_stages=4, num_micro_batches=8)  # type: ignore[operator]
    assert step_s(schedule, [{"F": 1.0, "B": 2.0}] * 4) == (8 + 4 - 1) * 3.0


def test_a_slow_first_stage_weighs_on_the_whole_step_and_sending_takes_time() -> None:
    schedule = PipelineSchedule.one_f_one_b(num_stages=2, num_micro_batches=4)
    assert step_s(schedule, [{"F": 1.0, "B": 3.0}, {"F": 1.0, "B": 2.0}]) > step_s(schedule, [{"F": 1.0, "B": 2.0}] * 2)
    single = schedule_of([["0F0", "0B0"], ["1F0", "1B0"]])
    assert step_s(single, [{"F": 1.0, "B": 2.0}] * 2, send_s=0.5) == 3.0 + 3.0 + 2 * 0.5


def test_ranks_that_wait_for_each_other_are_named() -> None:
    # Rank 0 runs its second stage first, which needs what rank 1 makes of its first.
    schedule = schedule_of([["2F0", "0F0", "2B0", "0B0"], ["1F0", "1B0"]])
    with pytest.raises(ScheduleError, match="the ranks wait for each other: rank 0 at 2F0, rank 1 at 1F0"):
        step_s(schedule, [{"F": 1.0, "B": 2.0}] * 3)
