"""Measure the peak growth of memory in each op of a step: its results and the kernel's workspace together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from recollect._torch_memory import AllocatorTrace, quiet_allocator
from recollect._torch_private import profiler_is_active
from recollect.errors import MeterError
from recollect.measuring.deaths import Deaths, added_up, is_of_the_allocator, reachable_storages


class CpuOpPeaks:
    """Splits the allocator's events of the whole step at marks: allocations of one byte before and after each op.

    Args:
        adds_up: whether to look at all tensors that there are, for the peak of the step.

    Attributes:
        step_bytes: most bytes alive in the step, of all tensors that Python can reach; 0 unless `adds_up`.
    """

    def __init__(self, *, adds_up: bool = False) -> None:
        self.step_bytes = 0
        self._adds_up = adds_up
        # Kept to the end, so that no other allocation can get the address of a mark.
        self._marks: list[torch.UntypedStorage] = []
        self._events: list[tuple[int, int]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the allocator's events during the block."""
        if profiler_is_active():
            raise MeterError("record: a profiler is active on this thread. Record outside of it.")
        before = Deaths(filter(is_of_the_allocator, reachable_storages()) if self._adds_up else ())
        trace = AllocatorTrace()
        with quiet_allocator():
            trace.start()
            try:
                yield
            finally:
                before.stop()
                self._events = trace.stop()
        if self._adds_up:
            marks = {mark.data_ptr() for mark in self._marks}
            events = [event for event in self._events if abs(event[1]) != 1 or event[0] not in marks]
            self.step_bytes = before.start_bytes + added_up(events, before.bytes_at)[0]

    def begin(self) -> None:
        """Mark the start of an op, or its end."""
        # Made directly, not by an op, so that dispatch modes do not see it.
        self._marks.append(torch.UntypedStorage(1, device="cpu"))

    end = begin

    def peaks_bytes(self) -> list[int]:
        """Return the peak growth of each op, from running sums between its marks."""
        addresses = {mark.data_ptr() for mark in self._marks}
        positions = {a: at for at, (a, num_bytes) in enumerate(self._events) if num_bytes == 1 and a in addresses}
        # A kernel's own thread may write its events late, so marks are looked up by address, not counted.
        order = [positions[mark.data_ptr()] for mark in self._marks]
        peaks: list[int] = []
        for begin, end in zip(order[::2], order[1::2], strict=True):
            total_bytes = peak_bytes = 0
            for _, num_bytes in self._events[begin + 1 : end]:
                total_bytes += num_bytes
                peak_bytes = max(peak_bytes, total_bytes)
            peaks.append(peak_bytes)
        self._marks, self._events = [], []
        return peaks


class CudaOpPeaks:
    """Reads the caching allocator's counters around each op.

    Attributes:
        step_bytes: most bytes allocated in the step.
    """

    def __init__(self, device: torch.device) -> None:
        self.step_bytes = 0
        self._device = device
        self._start_bytes = 0
        self._peaks_bytes: list[int] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Reset the peak counter; the allocator always counts."""
        torch.cuda.reset_peak_memory_stats(self._device)
        self.step_bytes = 0
        yield
        self._note()

    def _note(self) -> None:
        self.step_bytes = max(self.step_bytes, torch.cuda.max_memory_allocated(self._device))

    def begin(self) -> None:
        """Reset the peak counter."""
        self._note()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._start_bytes = torch.cuda.memory_allocated(self._device)

    def end(self) -> None:
        """Read the counter."""
        self._peaks_bytes.append(torch.cuda.max_memory_allocated(self._device) - self._start_bytes)

    def peaks_bytes(self) -> list[int]:
        """Return the peak growth of each op."""
        return self._peaks_bytes
