"""Measure the peak of a callable, in bytes, and how much memory grows in each op of a step.

On CUDA the caching allocator counts, and this module reads its counters. The CPU allocator does not count: its events are
recorded while the callable runs and added up afterwards. That is exact to the byte, unlike the resident set size, which the
C library's heap and the kernel's pages blur. Tensors from before the measurement, whose frees it does not report, are found at
the start, and their deaths placed among the events (`deaths.py`).
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from recollect._torch_memory import AllocatorTrace, quiet_allocator, some_profiler_is_active
from recollect.byte_format import format_bytes
from recollect.errors import MeterError
from recollect.measuring.deaths import OLDER, Deaths, added_up, allocated_storages, reachable_storages
from recollect.quantities import parse_bytes
from recollect.tensors import inner_tensors, sparse_parts

T = TypeVar("T")

_measuring: ContextVar[bool] = ContextVar("recollect_measuring", default=False)


@dataclass(frozen=True, kw_only=True)
class PeakMeasurement(Generic[T]):
    """The result of `measure_peak`.

    Attributes:
        device: the device that was measured, such as "cpu" or "cuda:0".
        start_bytes: bytes alive when the callable was called.
        peak_bytes: most bytes alive at any moment of the call, including bytes alive at its start.
        end_bytes: bytes alive when it had returned, its result included.
        peak_requested_bytes: on CUDA, most bytes requested, before the caching allocator rounded up; None on the CPU,
            where `peak_bytes` are the requested bytes.
        peak_reserved_bytes: on CUDA, most bytes that the caching allocator held, free blocks included; None on the CPU.
        fragmentation_bytes: on CUDA, `peak_reserved_bytes` minus the most bytes alive: free blocks that were too small or in
            the wrong place, and blocks cached before the call; None on the CPU.
        num_events: on the CPU, the number of allocations in the call and of their frees; None on CUDA.
        result: the callable's result.
    """

    device: str
    start_bytes: int
    peak_bytes: int
    end_bytes: int
    peak_requested_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    fragmentation_bytes: int | None = None
    num_events: int | None = None
    result: T = field(repr=False)

    @property
    def peak_growth_bytes(self) -> int:
        """The peak minus the bytes at the start, 0 or more."""
        return self.peak_bytes - self.start_bytes

    def __str__(self) -> str:
        text = (
            f"peak {format_bytes(self.peak_bytes)} on {self.device}: "
            f"{format_bytes(self.start_bytes)} before, {format_bytes(self.peak_growth_bytes)} on top"
        )
        if self.peak_reserved_bytes is None or self.fragmentation_bytes is None:
            return text
        fragmentation = format_bytes(self.fragmentation_bytes)
        return f"{text}; reserved {format_bytes(self.peak_reserved_bytes)}, {fragmentation} of it fragmentation"


def measure_peak(
    fn: Callable[[], T], *, device: str | torch.device | None = None, baseline_bytes: int | None = None
) -> PeakMeasurement[T]:
    """Call `fn` and measure the most bytes alive on a device at any moment of the call.

    On the CPU this is exact to the byte: every allocation of PyTorch's CPU allocator counts as requested, be it a tensor or
    an op's workspace, in forward and in backward. On CUDA the caching allocator counts, which rounds each block up (usually
    to 512 bytes).

    Args:
        fn: a callable without arguments, such as one training step. It is called once.
        device: a CPU or CUDA device. Default: the current CUDA device if this process has used CUDA, else the CPU.
        baseline_bytes: bytes to count as alive at the start. Default: on CUDA the allocated bytes; on the CPU the
            storages of all tensors that Python can reach.

    Returns:
        The peak, the bytes alive before and after, and the result of `fn`.

    Raises:
        MeterError: inside a running measurement; on the CPU, under a profiler; an unsupported kind of device.
        QuantityError: `baseline_bytes` is not a number of bytes.

    Complexity: on the CPU about 10 microseconds per allocation or free, most of it after `fn` has returned; do not time
        `fn` in the same call.

    Example:
        >>> import torch
        >>> found = measure_peak(lambda: torch.zeros(1000).exp().sum(), device="cpu", baseline_bytes=0)
        >>> found.peak_bytes, found.end_bytes
        (8000, 4)

    Limitations: on the CPU, memory that libraries allocate without PyTorch (oneDNN's scratch space, NumPy arrays) and
        memory of threads that `fn` starts does not count. Bytes from before the call that only C++ holds (saved by an
        earlier graph) are not found, nor are their frees; a storage from before the call that `fn` resizes counts at its
        old size until it dies. Both can only raise the growth.
    """
    where = _device_of(device)
    if baseline_bytes is not None:
        baseline_bytes = parse_bytes(baseline_bytes)
    if _measuring.get():
        raise MeterError("measure_peak: called inside a running measure_peak. Measure one callable at a time.")
    token = _measuring.set(True)
    try:
        # Garbage in reference cycles would be freed at a moment that differs from run to run.
        gc.collect()
        if where.type == "cuda":
            return _measure_cuda(fn, where, baseline_bytes)
        return _measure_cpu(fn, baseline_bytes)
    finally:
        _measuring.reset(token)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Add up the bytes of the distinct storages behind some tensors, of any device.

    Views of one storage count it once, and whole. Of tensors that consist of others (DTensor, sparse ones) these count.
    """
    return sum(storage.nbytes() for storage in storages_of(tensors))


def storages_of(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Return the distinct storages behind some tensors; see `storage_bytes`."""
    # Keyed by identity: the address of a storage on the meta device is 0. The storages are held so that ids stay taken.
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        for plain in _unwrapped(tensor):
            try:
                storage = plain.untyped_storage()
            except NotImplementedError:
                raise MeterError(
                    f"storage_bytes: got a {plain.layout} tensor of shape {list(plain.shape)}, expected a strided or sparse "
                    "one. Convert it with to_dense()."
                ) from None
            storages[id(storage)] = storage
    return list(storages.values())


def _unwrapped(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    parts = inner_tensors(tensor) or sparse_parts(tensor)
    if not parts:
        yield tensor
    for part in parts:
        yield from _unwrapped(part)


def _device_of(device: str | torch.device | None) -> torch.device:
    if device is None:
        where = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    else:
        where = torch.device(device)
    if where.type not in ("cpu", "cuda"):
        raise MeterError(f"measure_peak: got device {str(where)!r}, expected a CPU or CUDA device.")
    if where.type == "cuda":
        if not torch.cuda.is_available():
            raise MeterError(f"measure_peak: got device {str(where)!r}, but this PyTorch finds no CUDA device.")
        if where.index is None:
            where = torch.device("cuda", torch.cuda.current_device())
    return where


def _measure_cuda(fn: Callable[[], T], device: torch.device, baseline_bytes: int | None) -> PeakMeasurement[T]:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    allocated_bytes = torch.cuda.memory_allocated(device)
    result = fn()
    torch.cuda.synchronize(device)
    shift_bytes = 0 if baseline_bytes is None else baseline_bytes - allocated_bytes
    peak_bytes, reserved_bytes = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    # Not counted by every backend of the allocator (cudaMallocAsync).
    requested_bytes = torch.cuda.memory_stats(device).get("requested_bytes.all.peak")
    return PeakMeasurement(
        device=str(device),
        start_bytes=allocated_bytes + shift_bytes,
        peak_bytes=peak_bytes + shift_bytes,
        end_bytes=torch.cuda.memory_allocated(device) + shift_bytes,
        peak_requested_bytes=requested_bytes,
        peak_reserved_bytes=reserved_bytes,
        fragmentation_bytes=reserved_bytes - peak_bytes,
        result=result,
    )


def _measure_cpu(fn: Callable[[], T], baseline_bytes: int | None) -> PeakMeasurement[T]:
    watch = Deaths(reachable_storages())
    with traced("measure_peak", watch) as events:
        result = fn()
    peak_bytes, end_bytes, num_events = added_up(events)
    start_bytes = watch.start_bytes if baseline_bytes is None else baseline_bytes
    return PeakMeasurement(
        device="cpu",
        start_bytes=start_bytes,
        peak_bytes=start_bytes + peak_bytes,
        end_bytes=start_bytes + end_bytes,
        num_events=num_events,
        result=result,
    )


@contextmanager
def peak_on_cpu(known: Iterable[torch.Tensor] = ()) -> Iterator[list[int]]:
    """Measure the most bytes alive in the block, of all tensors that Python can reach, and the bytes alive when it began.

    `known`: those on the CPU count even if `torch.load` made them. Yields a list, which has both after the block.
    """
    found, on_cpu = list[int](), (tensor for tensor in known if tensor.device.type == "cpu")
    before = Deaths(allocated_storages(storages_of(on_cpu)))
    with traced("measure", before) as events:
        yield found
    found += [before.start_bytes + added_up(events)[0], before.start_bytes]


@contextmanager
def traced(call: str, before: Deaths) -> Iterator[list[tuple[int, int]]]:
    """Trace the CPU's allocator, and deaths of older storages; yields a list, which has all events after the block."""
    if some_profiler_is_active():
        raise MeterError(
            f"{call}: a profiler is already active, yours or that of a step that attach records. Measure "
            "outside of it, or call attached.remove()."
        )
    events, trace = list[tuple[int, int]](), AllocatorTrace()
    with quiet_allocator():
        try:
            trace.start()
            before.start()
            yield events
        finally:
            events += before.placed(trace.stop())
            before.stop()


class CpuOpPeaks:
    """Measures the bytes that each op of a step needs, its results and the kernel's workspace together.

    It splits the allocator's events of the whole step at marks: allocations of one byte before and after each op. Ops may run
    others.

    Attributes:
        step_bytes: most bytes alive in the step, of all tensors that Python can reach; 0 unless it knows those from before.
    """

    def __init__(self) -> None:
        self.step_bytes = 0
        # Where ops begin and end. Kept to the end: no other allocation can get the address of a mark.
        self._marks: list[list[torch.UntypedStorage]] = []
        self._running: list[list[torch.UntypedStorage]] = []
        self._events: list[tuple[int, int]] = []

    @contextmanager
    def recording(self, before: Deaths | None = None) -> Iterator[None]:
        """Record the allocator's events during the block; `before`: deaths of all that is alive when it begins."""
        with traced("record", before or Deaths(())) as self._events:
            yield
        if before is not None:
            marks = self._addresses()
            events = [event for event in self._events if abs(event[1]) != 1 or event[0] not in marks]
            self.step_bytes = before.start_bytes + added_up(events)[0]

    def begin(self) -> None:
        self._running.append([_mark()])
        self._marks.append(self._running[-1])

    def begin_again(self) -> None:
        """Take the op that is running for one that begins now."""
        self._running[-1].insert(0, _mark())

    def end(self) -> None:
        self._running.pop().append(_mark())

    def peaks_bytes(self) -> list[int]:
        """Return the peak growth of each op, from running sums between its marks."""
        addresses = self._addresses()
        positions = {a: at for at, (a, num_bytes) in enumerate(self._events) if num_bytes == 1 and a in addresses}
        # A kernel's own thread may write its events late, so marks are looked up by address, not counted.
        order = [[positions.get(mark.data_ptr(), -1) for mark in (own[0], own[-1])] for own in self._marks]
        if num_missing := sum(places.count(-1) for places in order):
            raise MeterError(
                f"record: the trace of the allocator lacks {num_missing} of the {2 * len(order)} marks around ops, as if they "
                "had run on a different thread. Record again, with the whole step on one thread and under no profiler."
            )
        peaks: list[int] = []
        for begin, end in order:
            total_bytes = peak_bytes = 0
            for address, num_bytes in self._events[begin + 1 : end]:
                is_mark = num_bytes == 1 and address in positions
                total_bytes += 0 if is_mark or address == OLDER else num_bytes
                peak_bytes = max(peak_bytes, total_bytes)
            peaks.append(peak_bytes)
        self._marks, self._events = [], []
        return peaks

    def _addresses(self) -> set[int]:
        return {mark.data_ptr() for own in self._marks for mark in own}


def _mark() -> torch.UntypedStorage:
    # Made directly, not by an op: dispatch modes do not see it.
    return torch.UntypedStorage(1, device="cpu")


class CudaOpPeaks:
    """Reads the caching allocator's counters around each op."""

    def __init__(self, device: torch.device) -> None:
        self.step_bytes = 0
        self._device = device
        # Of the ops that run: their numbers, and the bytes at their start.
        self._running: list[tuple[int, int]] = []
        self._peaks_bytes: list[int] = []

    @contextmanager
    def recording(self, before: Deaths | None = None) -> Iterator[None]:
        """Reset the peak counter; the allocator always counts, `before` or not."""
        torch.cuda.reset_peak_memory_stats(self._device)
        self.step_bytes = 0
        yield
        self._note()

    def _note(self) -> None:
        peak_bytes = torch.cuda.max_memory_allocated(self._device)
        self.step_bytes = max(self.step_bytes, peak_bytes)
        for number, start_bytes in self._running:
            self._peaks_bytes[number] = max(self._peaks_bytes[number], peak_bytes - start_bytes)

    def begin(self) -> None:
        self._note()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._running.append((len(self._peaks_bytes), torch.cuda.memory_allocated(self._device)))
        self._peaks_bytes.append(0)

    def begin_again(self) -> None:
        """Take the op that is running for one that begins now."""
        self._note()
        torch.cuda.reset_peak_memory_stats(self._device)
        number, _ = self._running.pop()
        self._running.append((number, torch.cuda.memory_allocated(self._device)))
        self._peaks_bytes[number] = 0

    def end(self) -> None:
        self._note()
        self._running.pop()

    def peaks_bytes(self) -> list[int]:
        return self._peaks_bytes
