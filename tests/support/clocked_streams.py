"""Streams on the CPU that check who has waited for whom, for `recollect.engine.offload.carriers`.

Each stream has a vector clock: how much of each stream's work is known to be over before its own next work begins. An event
is a copy of the clock, and to wait for it takes the larger number of each entry. Each access to memory is checked by clocks, so
that a wait that is missing shows even if the bytes came out right. Computing is what the test does, at once; copies are made
late: when what computes waits for them, or before that when a random number says so, and never where nobody waits.
"""

from __future__ import annotations

import ctypes
import random
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from recollect.engine.offload.carriers import StreamCarrier, Ticket
from recollect.engine.offload.pool import Slot

# What a copy that has not been made leaves where it is to go: NaN in all types with such a number.
_NOT_THERE = 0xFF


@dataclass(eq=False)
class Copy:
    """A copy: the `number`-th work of its stream, which begins after others."""

    stream: ClockedStream
    number: int
    target: int
    source: int
    nbytes: int
    after: list[Copy]
    is_made: bool = False


@dataclass(eq=False)
class Event:
    """What is over when it happens: work of each stream, and a copy."""

    clock: Counter[ClockedStream]
    last: Copy | None


class ClockedStream:
    """A stream, with what `torch.Stream` has of it; copies of one that computes are not in it."""

    def __init__(self, streams: ClockedStreams) -> None:
        self._streams = streams
        self.clock: Counter[ClockedStream] = Counter()
        self.last: Copy | None = None
        self.after: list[Copy] = []

    def record_event(self) -> Event:
        self._streams.go_on()
        return Event(Counter(self.clock), self.last)

    def wait_event(self, event: Event) -> None:
        self._streams.go_on()
        self.clock |= event.clock
        if event.last is None:
            return
        if self._streams.computes(self):
            self._streams.make(event.last)
        else:
            self.after.append(event.last)

    def knows(self, stream: ClockedStream, number: int) -> bool:
        """Whether work of a stream is over before the next of this one begins."""
        return self.clock[stream] >= number


@dataclass(eq=False)
class Memory:
    """Memory of the device: the stream that owns it, and the copies from it and to it."""

    home: ClockedStream
    copies: list[Copy] = field(default_factory=list)


class ClockedStreams:
    """Streams of a device that is the CPU.

    Args:
        seed: of when copies are made: with every third one as late as can be, with the next as soon, then at random.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._eagerness = (0.0, 1.0, 0.3)[seed % 3]
        self._all_computing: list[ClockedStream] = []
        self.computing = self.new_computing()
        self.races: list[str] = []
        self.num_copies = 0
        self._pending: list[Copy] = []
        self._memories: dict[int, Memory] = {}
        # Of the host's memory: begin, end, copy, whether it writes there.
        self._host: list[tuple[int, int, Copy, bool]] = []

    def new_computing(self) -> ClockedStream:
        stream = ClockedStream(self)
        self._all_computing.append(stream)
        return stream

    def computes(self, stream: ClockedStream) -> bool:
        return stream in self._all_computing

    def work(self) -> None:
        self.computing.clock[self.computing] += 1

    # What a carrier asks for

    def current(self, device: torch.device) -> ClockedStream:
        return self.computing

    def new(self, device: torch.device) -> ClockedStream:
        return ClockedStream(self)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy(self, stream: ClockedStream, target: torch.Tensor, source: torch.Tensor) -> None:
        self.num_copies += 1
        stream.clock[stream] += 1
        after = [*stream.after, *([stream.last] if stream.last is not None else [])]
        copy = Copy(stream, stream.clock[stream], target.data_ptr(), source.data_ptr(), len(source), after)
        stream.last, stream.after = copy, []
        self._pending.append(copy)
        is_out = self._is_host(target)
        what = "a copy out" if is_out else "a copy back"
        if not stream.knows(self.computing, self.computing.clock[self.computing]):
            self.races.append(f"{what} begins before {'the value' if is_out else 'room for it'} is there")
        device, host = (source, target) if is_out else (target, source)
        self._memory_of(device).copies.append(copy)
        self._check_host(copy, host.data_ptr(), writes=is_out, what=what)
        if not is_out:
            ctypes.memset(target.data_ptr(), _NOT_THERE, len(target))
        self.go_on()

    def _is_host(self, tensor: torch.Tensor) -> bool:
        """Slots are views of a slab, or slabs; what is on the device is a storage as a whole."""
        return getattr(tensor, "_is_slot", False)

    def _check_host(self, copy: Copy, begin: int, *, writes: bool, what: str) -> None:
        end = begin + copy.nbytes
        kept = []
        for entry in self._host:
            first, last, other, wrote = entry
            overlaps = first < end and begin < last
            if overlaps and (writes or wrote) and not copy.stream.knows(other.stream, other.number):
                self.races.append(f"{what} begins while another one {'writes' if wrote else 'reads'} the slot")
            if not (writes and begin <= first and last <= end):
                kept.append(entry)
        self._host = [*kept, (begin, end, copy, writes)]

    def _memory_of(self, tensor: torch.Tensor) -> Memory:
        storage = tensor.untyped_storage()
        memory = self._memories.get(id(storage))
        if memory is None:
            memory = self._memories[id(storage)] = Memory(self.computing)
            weakref.finalize(storage, self._free, id(storage)).atexit = False
        return memory

    def _free(self, number: int) -> None:
        memory = self._memories.pop(number)
        for copy in memory.copies:
            if not memory.home.knows(copy.stream, copy.number):
                self.races.append("memory of the device is freed while a copy is under way")
            if not copy.is_made:
                copy.is_made = True  # Never: there is no memory for it.
                self._pending.remove(copy)

    # Making copies

    def go_on(self) -> None:
        while self._pending and self._random.random() < self._eagerness:
            self.make(self._random.choice(self._pending))

    def make(self, copy: Copy) -> None:
        """Make a copy, after all those that it begins after."""
        if copy.is_made:
            return
        for other in copy.after:
            self.make(other)
        copy.after = []
        ctypes.memmove(copy.target, copy.source, copy.nbytes)
        copy.is_made = True
        self._pending.remove(copy)


class ClockedCarrier(StreamCarrier):
    """Carries copies in such streams; before each request, what computes has done something."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.streams = ClockedStreams(seed)

    def current(self, device: torch.device) -> Any:
        return self.streams.current(device)

    def new(self, device: torch.device) -> Any:
        return self.streams.new(device)

    def copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        self.streams.copy(stream, target, source)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return self.streams.host_memory(nbytes)

    def copy_out(self, source: torch.Tensor, slot: Slot) -> Ticket:
        self.streams.work()
        vars(slot.memory)["_is_slot"] = True
        return super().copy_out(source, slot)

    def copy_back(self, slot: Slot, target: torch.Tensor) -> Ticket:
        self.streams.work()
        return super().copy_back(slot, target)

    def wait(self, ticket: Any) -> None:
        self.streams.work()
        super().wait(ticket)
