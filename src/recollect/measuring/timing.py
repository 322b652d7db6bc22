"""Time what runs on a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

__all__ = ["timed", "timed_by_events", "wait_for"]

T = TypeVar("T")


def wait_for(device: torch.device) -> None:
    """Wait until a device has finished all its work; the CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(run: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """Run something on an idle device; return its result and the seconds until the device had finished it.

    On CUDA the time is between two events of the current stream: from when the device could have begun until it finished.
    """
    wait_for(device)
    if device.type == "cuda":
        return timed_by_events(run, device)
    begin = time.perf_counter()
    result = run()
    return result, time.perf_counter() - begin


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
