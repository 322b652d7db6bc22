"""How much memory grows within single ops of a step, on the CPU, worked out by hand."""

from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import pytest
import torch

from recollect.errors import MeterError
from recollect.measuring.deaths import Deaths, allocated_storages
from recollect.measuring.meter import CpuOpPeaks


def test_each_op_has_its_own_peak() -> None:
    peaks = CpuOpPeaks()
    values = torch.randn(1000)
    with peaks.recording():
        peaks.begin()
        result = values.exp()
        peaks.end()
        outside = result.sin()
        peaks.begin()
        outside.cos_()
        peaks.end()
        peaks.begin()
        first = torch.zeros(300, dtype=torch.uint8)
        second = torch.zeros(200, dtype=torch.uint8)
        del first
        third = torch.zeros(100, dtype=torch.uint8)
        peaks.end()
    assert (result.nbytes, outside.nbytes, second.nbytes, third.nbytes) == (4000, 4000, 200, 100)
    assert peaks.peaks_bytes() == [4000, 0, 500]


def test_code_that_runs_ops_has_a_peak_from_when_it_began_last() -> None:
    peaks = CpuOpPeaks()
    with peaks.recording():
        peaks.begin()
        saved = torch.zeros(400, dtype=torch.uint8)
        peaks.begin_again()
        made = torch.zeros(300, dtype=torch.uint8)
        peaks.begin()
        torch.zeros(200, dtype=torch.uint8)
        peaks.end()
        del made
        last = torch.zeros(100, dtype=torch.uint8)
        peaks.end()
    assert (saved.nbytes, last.nbytes) == (400, 100)
    assert peaks.peaks_bytes() == [500, 200]


def test_a_storage_that_dies_on_a_different_thread() -> None:
    """As those that a communication library holds: the allocator is traced on this thread only."""
    peaks = CpuOpPeaks()
    held = [torch.randn(1000) for _ in range(50)]
    with peaks.recording(Deaths(allocated_storages())):
        thread = Thread(target=held.clear)
        thread.start()
        thread.join()
        for _ in range(100):
            peaks.begin()
            torch.zeros(100, dtype=torch.uint8)
            peaks.end()
    assert peaks.peaks_bytes() == [100] * 100


def test_ops_on_a_thread_that_the_trace_does_not_see_are_an_error() -> None:
    peaks = CpuOpPeaks()
    with peaks.recording():
        peaks.begin()
        peaks.end()
        with ThreadPoolExecutor(1) as other:
            other.submit(peaks.begin).result()
            other.submit(peaks.end).result()
    message = (
        "^record: the trace of the allocator lacks 2 of the 4 marks around ops, as if they had run on a different thread. "
        "Record again, with the whole step on one thread and under no profiler.$"
    )
    with pytest.raises(MeterError, match=message):
        peaks.peaks_bytes()
