"""Trace a device's allocator in each part of a piece of work, every allocation and free by its address."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from recollect._torch_memory import CudaAllocatorTrace
from recollect.measuring.deaths import Deaths
from recollect.measuring.meter import traced
from recollect.profile.profile import block_bytes


class PartsTrace:
    """Traces work that calls `mark` where a part ends and the next one begins.

    Attributes:
        parts: after the work, for each part the events in order: (address, bytes that an allocation takes; 0 for a free).
    """

    def __init__(self, device: torch.device) -> None:
        self.parts: list[list[tuple[int, int]]] = []
        self._device = device
        self._cuda = CudaAllocatorTrace(device) if device.type == "cuda" else None
        # Where parts end: on CUDA by number of events; on the CPU by allocations of one byte. These live to the end: no other
        # allocation can get their addresses.
        self._ends: list[int] = []
        self._marks: list[torch.UntypedStorage] = []

    def mark(self) -> None:
        if self._cuda is not None:
            self._ends.append(len(self._cuda.events()))
        else:
            # Made directly, not by an op: dispatch modes do not see it.
            self._marks.append(torch.UntypedStorage(1, device="cpu"))

    def address_of(self, storage: torch.UntypedStorage) -> int:
        return storage.data_ptr()

    @contextmanager
    def recording(self) -> Iterator[None]:
        gc.collect()  # Garbage in reference cycles would be freed at some moment of the block.
        if self._cuda is not None:
            self._cuda.start()
            try:
                yield
                self._split(self._cuda.events(), self._ends)
            finally:
                self._cuda.stop()
            return
        with traced("record", Deaths(())) as events:
            yield
        # The last event at a mark's address is the mark; earlier ones are not.
        places = {address: place for place, (address, nbytes) in enumerate(events) if nbytes == 1}
        ends = [places[mark.data_ptr()] for mark in self._marks]
        marks = set(ends)
        rest = [event for place, event in enumerate(events) if place not in marks]
        self._split(rest, [place - number for number, place in enumerate(ends)])

    def _split(self, events: list[tuple[int, int]], ends: list[int]) -> None:
        for begin, end in zip([0, *ends], [*ends, len(events)], strict=True):
            part = events[begin:end]
            self.parts.append([(address, block_bytes(max(0, nbytes), self._device.type)) for address, nbytes in part])
