"""Seconds that a device takes for what it was given."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

__all__ = ["timed", "timed_by_events", "wait_for"]

T = TypeVar("T")


def wait_for(device: torch.device) -> None:
    """Wait until a device has done all that it was given to do; the CPU is never behind."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(run: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """Run something, and return what it returns and the seconds until the device had done all of it, and nothing else.

    On CUDA between two events of the current stream: from when the device could have begun until it was done.
    """
    wait_for(device)
    if device.type == "cuda":
        return timed_by_events(run, device)
    begin = time.perf_counter()
    result = run()
    return result, time.perf_counter() - begin


def timed_by_events(run: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """Run something on CUDA; return what it returns and the seconds between events before and after it.

    What the device was given before counts if it is not done yet; see `timed`.
    """
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = run()
        end.record()
    end.synchronize()
    return result, float(begin.elapsed_time(end)) / 1000
