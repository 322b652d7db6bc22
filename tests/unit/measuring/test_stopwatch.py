"""What a run takes by the clock of its device, and stretches of a step, added up while it runs.

Other programs count only where processes wait for each other, or a CPU works on several threads.
"""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from recollect.measuring import stopwatch
from recollect.measuring.stopwatch import Seconds, Stopwatch
from recollect.measuring.timing import timed, timed_work, work_clock

CPU = torch.device("cpu")


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Stopwatch:
    """A watch whose clock is a second later each time."""
    seconds = itertools.count()
    monkeypatch.setattr(stopwatch, "work_clock", lambda _device: lambda: float(next(seconds)))
    return Stopwatch(CPU)


def test_stretches_are_added_up(watch: Stopwatch) -> None:
    for _ in range(3):
        with watch.running():
            pass
    assert watch.read() == Seconds(3.0, 3.0)


def test_a_stretch_within_one_is_part_of_it(watch: Stopwatch) -> None:
    with watch.running(), watch.running():
        pass
    assert watch.read() == Seconds(1.0, 1.0)


def test_a_stretch_that_fails_counts(watch: Stopwatch) -> None:
    with pytest.raises(ZeroDivisionError), watch.running():
        raise ZeroDivisionError
    watch.start()
    watch.stop()
    assert watch.read() == Seconds(2.0, 2.0)


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test_time_is_that_of_the_run_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter((10.0, 12.5, 20.0, 21.5))
    assert timed(lambda: "done", CPU, clock=lambda: next(now)) == ("done", 2.5)
    monkeypatch.setattr(time, "thread_time", lambda: next(now))
    with threads(1):
        assert timed_work(lambda: "done", CPU) == ("done", 1.5)


def test_what_waits_for_others_is_timed_by_the_wall_clock() -> None:
    with threads(2):
        assert work_clock(CPU) is time.perf_counter
    with threads(1):
        assert work_clock(torch.device("mps")) is time.perf_counter
        assert work_clock(CPU) is time.thread_time
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        try:
            assert work_clock(CPU) is time.perf_counter
        finally:
            torch.distributed.destroy_process_group()
