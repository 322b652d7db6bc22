"""Add up the time of stretches of a step while it runs, without waiting for the device."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from recollect.measuring.timing import work_clock


class Seconds(NamedTuple):
    """Seconds on the host and on the device; on a CPU they are the same."""

    host_s: float
    device_s: float


class Stopwatch:
    """Adds up stretches of work on a device. Those within a stretch are part of it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        # On CUDA the host's own time: backward has its own thread there.
        self._clock = time.perf_counter if self._is_cuda else work_clock(device)
        self._is_running = False
        self._host_s = 0.0
        self._events: list[torch.cuda.Event] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        if self._is_running:
            yield
            return
        self.start()
        try:
            yield
        finally:
            self.stop()

    def start(self) -> None:
        self._is_running = True
        if self._is_cuda:
            self._events.append(self._now())
        self._begin_s = self._clock()

    def stop(self) -> None:
        self._host_s += self._clock() - self._begin_s
        if self._is_cuda:
            self._events.append(self._now())
        self._is_running = False

    def read(self) -> Seconds | None:
        """Return the sum; None while the device has not finished."""
        if not self._is_cuda:
            return Seconds(self._host_s, self._host_s)
        begins, ends = self._events[::2], self._events[1::2]
        if not all(end.query() for end in ends):
            return None
        device_ms = sum(begin.elapsed_time(end) for begin, end in zip(begins, ends, strict=True))
        return Seconds(self._host_s, device_ms / 1000)

    def _now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        # Without a stream it would be of the current device, which may be a different one.
        event.record(torch.cuda.current_stream(self._device))
        return event
