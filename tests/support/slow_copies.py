"""Copies between "device" and host memory on the CPU that take as long as over a link."""

import ctypes
import time
from concurrent.futures import Future, wait

import torch

from recollect.engine.offload.carriers import ThreadCarrier

_CHUNK_BYTES = 2**20


class SlowCarrier(ThreadCarrier):
    """Copies no more bytes in a second than it is told; None: as many as can be.

    Args:
        to_host_bytes_per_s: the most that go out.
        from_host_bytes_per_s: the most that come back.
    """

    def __init__(self, to_host_bytes_per_s: float | None, from_host_bytes_per_s: float | None) -> None:
        super().__init__()
        self._bytes_per_s = {True: to_host_bytes_per_s, False: from_host_bytes_per_s}

    def begin(
        self, target: torch.Tensor, source: torch.Tensor, after: list[Future[None]], *, is_out: bool
    ) -> Future[None]:
        rate = self._bytes_per_s[is_out]
        if rate is None:
            return super().begin(target, source, after, is_out=is_out)
        thread = self._out if is_out else self._back
        return thread.submit(_copy, target.data_ptr(), source.data_ptr(), len(source), rate, after)


def _copy(target: int, source: int, nbytes: int, bytes_per_s: float, after: list[Future[None]]) -> None:
    wait(after)
    begin = time.perf_counter()
    for done in range(0, nbytes, _CHUNK_BYTES):
        length = min(_CHUNK_BYTES, nbytes - done)
        ctypes.memmove(target + done, source + done, length)
        time.sleep(max(0.0, begin + (done + length) / bytes_per_s - time.perf_counter()))
