"""Time work on a device."""

import time
from collections.abc import Callable
from typing import TypeVar

import torch

from recollect._torch_parallel import has_process_group

T = TypeVar("T")


def wait_for(device: torch.device) -> None:
    """Wait until a device has finished all its work; the CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(
    run: Callable[[], T], device: torch.device, *, clock: Callable[[], float] = time.perf_counter
) -> tuple[T, float]:
    """Run something on an idle device; return its result and the seconds until the device had finished it.

    On CUDA the time is between two events of the current stream: from when the device could have begun until it finished.
    Elsewhere it is wall-clock time.
    """
    wait_for(device)
    if device.type == "cuda":
        return timed_by_events(run, device)
    begin = clock()
    result = run()
    return result, clock() - begin


def timed_work(run: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """Run something on an idle device, as `timed` does; return its result and its seconds by `work_clock`."""
    return timed(run, device, clock=work_clock(device))


def work_clock(device: torch.device) -> Callable[[], float]:
    """Return the clock for work on a device that other programs disturb least.

    On a CPU with one thread, this is that thread's processor time, which leaves out time when others had the core. It also
    leaves out waiting for other processes, so if there are any this is the wall clock, as with several threads.
    """
    is_alone = device.type == "cpu" and torch.get_num_threads() == 1 and not has_process_group()
    return time.thread_time if is_alone else time.perf_counter


def timed_by_events(run: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """Run something on CUDA; return its result and the seconds between events before and after it.

    Earlier work counts if the device has not finished it yet; see `timed`.
    """
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = run()
        end.record()
    end.synchronize()
    return result, float(begin.elapsed_time(end)) / 1000
