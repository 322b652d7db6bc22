"""Carries copies on accelerators, with one stream for each direction, from and to host memory that is made ready once.

Nothing here waits on the host, and nothing asks whether a copy is over. Memory of the device belongs to the stream that was the
current one when it was allocated, and is used again there: so that stream, too, waits for copies (rules 2, 6 and 7).

Limitations: it has never run on a device but PyTorch's pretend one (OpenReg). Tests run it on the CPU, with streams that check
who has waited for whom. Which node of the host's memory (NUMA) is near the device, is not looked at.
"""

from __future__ import annotations

import mmap
import os
from typing import Any, NamedTuple, Protocol

import torch

from recollect.engine.offload.pool import Slot
from recollect.errors import OffloadError

# All contexts of the process may copy from and to it: `cudaHostRegisterPortable`.
_PORTABLE = 1


class Ticket(NamedTuple):
    """A copy under way: an event at its end, and the stream that was the current one when it was asked for."""

    end: Any
    home: Any
    device: torch.device


class Streams(Protocol):
    """What carries copies in streams needs of a kind of device; streams and events are as PyTorch's."""

    def current(self, device: torch.device) -> Any:
        """Return the stream that computes now."""
        ...

    def new(self, device: torch.device) -> Any:
        """Return a stream for copies."""
        ...

    def copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy in a stream."""
        ...

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Return a stretch of memory of the host that streams can copy from and to by themselves."""
        ...


class StreamCarrier:
    """Copies in two streams of each device."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._lanes: dict[tuple[str, torch.device], Any] = {}

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Return a stretch of memory of the host.

        Raises:
            OffloadError: there is not so much, or the device cannot be told of it.
        """
        return self._streams.host_memory(nbytes)

    def copy_out(self, source: torch.Tensor, slot: Slot) -> Ticket:
        """Begin to copy bytes to a slot, after the op that computes them, and after copies from and to the slot."""
        return self._copy("out", source.device, slot.memory, source, slot.copies)

    def copy_back(self, slot: Slot, target: torch.Tensor) -> Ticket:
        """Begin to copy a slot to bytes, after they were allocated and after the copy out."""
        return self._copy("back", target.device, target, slot.memory, slot.copies)

    def _copy(
        self, direction: str, device: torch.device, target: torch.Tensor, source: torch.Tensor, after: list[Ticket]
    ) -> Ticket:
        home = self._streams.current(device)
        lane = self._lanes.get((direction, device))
        if lane is None:
            lane = self._lanes[direction, device] = self._streams.new(device)
        lane.wait_event(home.record_event())
        for ticket in after:
            lane.wait_event(ticket.end)
        self._streams.copy(lane, target, source)
        return Ticket(lane.record_event(), home, device)

    def wait(self, ticket: Ticket) -> None:
        """Have the stream that computes now wait for a copy, and the one whose memory it reads or writes."""
        here = self._streams.current(ticket.device)
        here.wait_event(ticket.end)
        if here != ticket.home:
            ticket.home.wait_event(ticket.end)


class AcceleratorStreams:
    """Streams of PyTorch's accelerator."""

    def current(self, device: torch.device) -> torch.Stream:
        """Return the stream that computes now."""
        return torch.accelerator.current_stream(device)

    def new(self, device: torch.device) -> torch.Stream:
        """Return a stream for copies."""
        return torch.Stream(device)

    def copy(self, stream: torch.Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy in a stream."""
        with stream:
            target.copy_(source, non_blocking=True)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Return a stretch of memory of the host: on CUDA registered, elsewhere pinned by PyTorch, in powers of two.

        Raises:
            OffloadError: there is not so much, or the device cannot be told of it.
        """
        try:
            if torch.cuda.is_available() and hasattr(mmap, "MADV_DONTFORK"):
                return torch.frombuffer(_Registered(nbytes), dtype=torch.uint8)
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except (OSError, RuntimeError) as error:
            raise OffloadError(
                reason=f"{nbytes} bytes of the host's memory cannot be pinned ({error}); lower host_budget, raise the limit of "
                "locked memory (`ulimit -l`), or under WSL 2 and in a container the memory that it may use"
            ) from None


class _Registered(mmap.mmap):
    """Memory that CUDA devices copy from and to by themselves, for as long as this lives.

    Raises:
        OSError: there is not so much memory.
        RuntimeError: the driver will not have it.
    """

    def __new__(cls, nbytes: int) -> _Registered:
        made = super().__new__(cls, -1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A child would share its pages, and the first write would give this process others than the device knows.
        made.madvise(mmap.MADV_DONTFORK)
        made._address = torch.frombuffer(made, dtype=torch.uint8).data_ptr()
        error = int(torch.cuda.cudart().cudaHostRegister(made._address, nbytes, _PORTABLE))
        if error:
            _forget_last_error()
            raise RuntimeError(f"cudaHostRegister: error {error}")
        made._process = os.getpid()
        return made

    _address: int
    _process = -1

    def __del__(self) -> None:
        if self._process == os.getpid():
            # Copies may still run that nobody needs. This is not within a step.
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self._address)


def _forget_last_error() -> None:
    """Have the runtime report its last error now, which it would report to whoever launches the next kernel."""
    try:
        torch.ones(1, device="cuda").add_(1)
    except RuntimeError:
        pass
