"""Carries copies on the CPU, with one thread for each direction, from and to a mapped file."""

from __future__ import annotations

import ctypes
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from recollect.engine.offload.pool import Slot
from recollect.errors import OffloadError
from recollect.measuring.host_memory import mapped_file

# Where the rate is limited, so many bytes are copied at a time.
_CHUNK_BYTES = 2**20


class ThreadCarrier:
    """Copies with two threads, which end with it.

    Args:
        to_host_bytes_per_s: the most bytes that go out in a second; None for as many as can.
        from_host_bytes_per_s: the same for those that come back.
    """

    def __init__(self, to_host_bytes_per_s: float | None = None, from_host_bytes_per_s: float | None = None) -> None:
        self._to_host_bytes_per_s = to_host_bytes_per_s
        self._from_host_bytes_per_s = from_host_bytes_per_s
        self._out = ThreadPoolExecutor(1, "recollect copies out")
        self._back = ThreadPoolExecutor(1, "recollect copies back")

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Return a stretch of a mapped file, for which there is room.

        Raises:
            OffloadError: there is not.
        """
        try:
            return mapped_file(nbytes)
        except OSError as error:
            raise OffloadError(
                reason=f"a file of {nbytes} bytes in {tempfile.gettempdir()} cannot be had ({error}); set TMPDIR to a folder "
                "with more room, or lower host_budget"
            ) from None

    # Threads get addresses, not tensors: memory is then freed by whoever computes, where it is counted. It is not before the
    # copy is over (rules 6 and 7).

    def copy_out(self, source: torch.Tensor, slot: Slot) -> Future[None]:
        """Begin to copy bytes to a slot, after copies from it and to it: the op that computes them has run."""
        addresses = slot.memory.data_ptr(), source.data_ptr()
        return self._out.submit(_copy, *addresses, len(source), self._to_host_bytes_per_s, slot.copies)

    def copy_back(self, slot: Slot, target: torch.Tensor) -> Future[None]:
        """Begin to copy a slot to bytes, after the copy out."""
        addresses = target.data_ptr(), slot.memory.data_ptr()
        return self._back.submit(_copy, *addresses, len(target), self._from_host_bytes_per_s, slot.copies)

    def wait(self, ticket: Future[None]) -> None:
        """Wait for a copy; raise what went wrong with it."""
        ticket.result()


def _copy(target: int, source: int, nbytes: int, bytes_per_s: float | None, after: list[Future[None]]) -> None:
    # Who needs them is told if they fail.
    wait(after)
    if bytes_per_s is None:
        ctypes.memmove(target, source, nbytes)
        return
    begin = time.perf_counter()
    for done in range(0, nbytes, _CHUNK_BYTES):
        length = min(_CHUNK_BYTES, nbytes - done)
        ctypes.memmove(target + done, source + done, length)
        time.sleep(max(0.0, begin + (done + length) / bytes_per_s - time.perf_counter()))
