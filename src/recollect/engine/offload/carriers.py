"""Host memory for a device, and the carriers of copies between them: threads on the CPU, streams on accelerators.

The computing stream and the two copy engines run concurrently. Who waits for whom:

1. a copy out waits for the op that made the value;
2. a value leaves the device when its copy out is over: computation waits for that;
3. bytes for a copy back are allocated by the computing code, and the copy waits until then;
4. every use of a value waits for its copy back;
5. a copy out into a slot waits for the last copies from and to it;
6. a value that is freed while it comes back waits first,
7. and so does one that is freed while it is copied out;
8. a copy back waits for its copy out.

Nothing else waits, and nothing polls a copy: the times when values leave and return do not depend on copy speed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from recollect.engine.offload.pool import HostPool, Slot
from recollect.errors import OffloadError
from recollect.measuring.host_memory import mapped_file


class Carrier:
    """Copies bytes between a device and host memory; a ticket stands for a copy under way."""

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Return a stretch of host memory, as bytes; raise `OffloadError` if it is too small, or cannot be used."""
        raise NotImplementedError

    def copy_out(self, source: torch.Tensor, slot: Slot) -> Any:
        """Begin to copy bytes to a slot, after the ops that compute them and after the slot's copies; return a ticket."""
        return self.begin(slot.memory, source, slot.copies, is_out=True)

    def copy_back(self, slot: Slot, target: torch.Tensor) -> Any:
        """Begin to copy a slot to bytes that were just allocated, after the slot's copies; return a ticket."""
        return self.begin(target, slot.memory, slot.copies, is_out=False)

    def begin(self, target: torch.Tensor, source: torch.Tensor, after: list[Any], *, is_out: bool) -> Any:
        """Begin to copy bytes, after the copies of some tickets; return a ticket."""
        raise NotImplementedError

    def wait(self, ticket: Any) -> None:
        """Have computation wait for a copy; raise the error of the copy, if any."""
        raise NotImplementedError


class ThreadCarrier(Carrier):
    """Copies on the CPU, with one thread for each direction, from and to a mapped file; the threads end with it."""

    def __init__(self) -> None:
        self._out = ThreadPoolExecutor(1, "recollect copies out")
        self._back = ThreadPoolExecutor(1, "recollect copies back")

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Return a stretch of a mapped file, once there is room for it."""
        try:
            return mapped_file(nbytes)
        except OSError as error:
            raise OffloadError(
                reason=f"a file of {nbytes} bytes in {tempfile.gettempdir()} is not available ({error}); set TMPDIR to a "
                "folder with more room, or lower host_budget"
            ) from None

    def begin(
        self, target: torch.Tensor, source: torch.Tensor, after: list[Future[None]], *, is_out: bool
    ) -> Future[None]:
        """Begin to copy in a thread: the op that computes the bytes has run."""
        # Threads get addresses, not tensors: memory is then freed by the computing thread, where it is counted, and not before
        # the copy is over (rules 6 and 7).
        thread = self._out if is_out else self._back
        return thread.submit(_copy, target.data_ptr(), source.data_ptr(), len(source), after)

    def wait(self, ticket: Future[None]) -> None:
        ticket.result()


def _copy(target: int, source: int, nbytes: int, after: list[Future[None]]) -> None:
    # Whoever needs their result learns if they fail.
    wait(after)
    ctypes.memmove(target, source, nbytes)


# All contexts of the process may copy from and to it: `cudaHostRegisterPortable`.
_PORTABLE = 1


class Ticket(NamedTuple):
    """A copy under way: an event at its end, and the stream that was current when it was requested."""

    end: Any
    home: Any
    device: torch.device


class StreamCarrier(Carrier):
    """Copies on accelerators, with one stream for each direction, from and to host memory that is prepared once.

    Nothing here waits on the host, and nothing polls copies. Memory of the device belongs to the stream that was
    current when it was allocated, and is reused there: so that stream also waits for copies (rules 2, 6 and 7).
    Streams belong to PyTorch's accelerator, unless a subclass has others.

    Limitations: it has only run on PyTorch's simulated device (OpenReg). Tests run it on the CPU, with streams that
    check who has waited for whom. It ignores which node of the host's memory (NUMA) is near the device.

    Args:
        device: where values are computed; on CUDA, memory is registered by its driver's context, and by no other device's.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._lanes: dict[tuple[bool, torch.device], Any] = {}

    def current(self, device: torch.device) -> torch.Stream:
        return torch.accelerator.current_stream(device)

    def new(self, device: torch.device) -> torch.Stream:
        return torch.Stream(device)

    def copy(self, stream: torch.Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        with stream:
            target.copy_(source, non_blocking=True)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Return a stretch of memory of the host: on CUDA registered, elsewhere pinned by PyTorch, in powers of two."""
        try:
            if torch.cuda.is_available() and hasattr(mmap, "MADV_DONTFORK"):
                return torch.frombuffer(_Registered(nbytes, self._device), dtype=torch.uint8)
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except (OSError, RuntimeError) as error:
            raise OffloadError(
                reason=f"{nbytes} bytes of the host's memory cannot be pinned ({error}); lower host_budget, raise the limit of "
                "locked memory (`ulimit -l`), or under WSL 2 and in a container the memory that it may use"
            ) from None

    def begin(self, target: torch.Tensor, source: torch.Tensor, after: list[Ticket], *, is_out: bool) -> Ticket:
        """Begin to copy in a stream, after the computing stream's current work and after other copies."""
        device = source.device if is_out else target.device
        home = self.current(device)
        lane = self._lanes.get((is_out, device))
        if lane is None:
            lane = self._lanes[is_out, device] = self.new(device)
        lane.wait_event(home.record_event())
        for ticket in after:
            lane.wait_event(ticket.end)
        self.copy(lane, target, source)
        return Ticket(lane.record_event(), home, device)

    def wait(self, ticket: Ticket) -> None:
        """Have the current computing stream wait for a copy, and the stream whose memory the copy reads or writes."""
        here = self.current(ticket.device)
        here.wait_event(ticket.end)
        if here != ticket.home:
            ticket.home.wait_event(ticket.end)


class _Registered(mmap.mmap):
    """Memory that CUDA devices copy from and to by themselves, for as long as this lives.

    Raises:
        OSError: the memory is not available.
        RuntimeError: the driver refuses it.
    """

    def __new__(cls, nbytes: int, device: torch.device | None) -> _Registered:
        made = super().__new__(cls, -1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A forked child would share its pages, and the first write would give this process pages unknown to the device.
        made.madvise(mmap.MADV_DONTFORK)
        made._address = torch.frombuffer(made, dtype=torch.uint8).data_ptr()
        with torch.cuda.device(device):
            error = int(torch.cuda.cudart().cudaHostRegister(made._address, nbytes, _PORTABLE))
            if error:
                # Have the runtime report its last error now, which it would otherwise report at the next kernel launch.
                with suppress(RuntimeError):
                    torch.ones(1, device="cuda").add_(1)
                raise RuntimeError(f"cudaHostRegister: error {error}")
        made._device, made._process = device, os.getpid()
        return made

    _address: int
    _device: torch.device | None
    _process = -1

    def __del__(self) -> None:
        if self._process == os.getpid():
            # Copies that nobody needs may still run. No step is running here.
            torch.cuda.synchronize(self._device)
            torch.cuda.cudart().cudaHostUnregister(self._address)


CARRIERS: dict[str, Callable[[], Carrier]] = {"cpu": ThreadCarrier}
"""The one place to register a carrier, by the type of the device, if streams of PyTorch's accelerator do not suit it."""


def carrier_for(device: torch.device) -> Carrier:
    accelerator = torch.accelerator.current_accelerator()
    if device.type in CARRIERS:
        return CARRIERS[device.type]()
    if accelerator is not None and device.type == accelerator.type:
        return StreamCarrier(device)
    expected = f"{', '.join(CARRIERS)}, or PyTorch's accelerator, which is {accelerator}"
    raise OffloadError(reason=f"values on {device} cannot be copied; expected {expected}")


class Host:
    """Host memory for a device, as large as values need where that is known, and what copies them; counts: see `HostUse`."""

    def __init__(self, device: torch.device, most_bytes: int | None) -> None:
        self.device = device
        self.carrier = carrier_for(device)
        self.pool = HostPool(self.carrier.host_memory, most_bytes)
        self.num_missed = 0
        self.stalled_s = 0.0

    def wait(self, ticket: Any) -> None:
        begin = time.perf_counter()
        self.carrier.wait(ticket)
        self.stalled_s += time.perf_counter() - begin
