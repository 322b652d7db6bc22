"""Clocks: other programs count only where processes wait for each other, or a CPU works on several threads."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from recollect.measuring.timing import timed, timed_work, work_clock

CPU = torch.device("cpu")


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
