"""Traces PyTorch's allocators; the private names for that, each with its reason."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import _disable_profiler, _enable_profiler, _prepare_profiler
from torch._C._profiler import (
    ProfilerActivity,
    ProfilerConfig,
    ProfilerState,
    RecordScope,
    _EventType,
    _ExperimentalConfig,
)

from recollect._torch_private import NEWEST_TESTED, OLDEST_TESTED, profiler_is_active
from recollect.errors import MeterError
from recollect.thread_end import at_end_of_thread

# An amount that nobody else allocates.
_PROBE_BYTES = 3

# Kineto serves one thread at a time: a second one that starts it crashes the process.
_TURN = threading.Lock()
_MOST_WAIT_S = 60.0


def some_profiler_is_active() -> bool:
    """Whether a profiler is active on this thread, or the user's is on a different one."""
    return profiler_is_active() or torch.autograd.profiler._is_profiler_enabled


class AllocatorTrace:
    """The CPU allocator's record of every allocation and free, in order, in bytes.

    `torch.profiler` has no public form of it with addresses, which tell a free of this trace's memory from a free of
    memory that an earlier trace saw. It also records every op, which is slow; here only memory is recorded. Covers
    the thread that starts it and the threads of autograd that work for it.
    """

    _end: weakref.finalize[[], Any] | None = None

    def start(self) -> None:
        """Begin to record, until `stop` or the end of the thread: a profiler that outlives it crashes the process."""
        _let_forked_processes_end()
        if not _TURN.acquire(timeout=_MOST_WAIT_S):
            raise MeterError(
                f"a different thread has measured memory on the CPU for {_MOST_WAIT_S:.0f} s, as in a step that attach "
                "records, and one at a time can. Do not let that step wait for this thread; or let them take turns."
            )
        self._end, self._thread = at_end_of_thread(_close), threading.get_ident()
        config = ProfilerConfig(ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig())
        with _quiet_first_profile():
            _prepare_profiler(config, {ProfilerActivity.CPU})
            # The scope leaves out the ops. The stub of this function does not know its third argument.
            _enable_profiler(config, {ProfilerActivity.CPU}, {RecordScope.USER_SCOPE})  # type: ignore[call-arg]
        self._probe = torch.UntypedStorage(_PROBE_BYTES).data_ptr()

    def stop(self) -> list[tuple[int, int]]:
        """End the recording and return (address, bytes) per event in order of time; a free has negative bytes."""
        is_users = torch.autograd.profiler._is_profiler_enabled
        # The end of the thread that started it closes it, if not this.
        result = self._end() if self._end is not None and self._thread == threading.get_ident() else None
        if result is None:
            return []
        pending = list(reversed(result.experimental_event_tree()))
        events: list[tuple[int, int, int]] = []
        while pending:
            event = pending.pop()
            if event.tag == _EventType.Allocation:
                fields: Any = event.extra_fields
                if fields.device.type == "cpu":
                    events.append((event.start_time_ns, fields.ptr, fields.alloc_size))
            pending.extend(reversed(event.children))
        events.sort(key=lambda event: event[0])
        found = [(address, num_bytes) for _, address, num_bytes in events]
        for probe in ((self._probe, _PROBE_BYTES), (self._probe, -_PROBE_BYTES)):
            if probe not in found and is_users:
                raise MeterError(
                    "a profiler was started while memory on the CPU was measured, as in a step that attach records, which ends "
                    "the measurement. Start it around whole steps: these are not recorded."
                )
            if probe not in found:
                raise MeterError(
                    f"the allocator's trace of torch {torch.__version__} does not show what is allocated, so memory on "
                    f"the CPU cannot be measured. Install torch {OLDEST_TESTED} to {NEWEST_TESTED}, or a newer recollect."
                )
            found.remove(probe)
        return found


@functools.cache
def _let_forked_processes_end() -> None:
    """Make forked processes skip C++ destructors on exit: Kineto's would wait for a thread that only this process has."""
    library = ctypes.CDLL(None)
    if hasattr(library, "on_exit"):  # glibc calls `_exit(status, None)`
        os.register_at_fork(after_in_child=lambda: library.on_exit(library._exit, None))


def _close() -> Any:
    """End the recording of this thread; None if a profiler has ended it since."""
    try:
        return _disable_profiler() if profiler_is_active() else None
    finally:
        _TURN.release()


class CudaAllocatorTrace:
    """The CUDA allocator's own history of allocations and frees, in the order in which the program asked for them.

    There is no public form of it. A history that the user has switched on is cleared, and ends with it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = torch.cuda.current_device() if device.index is None else device.index

    def start(self) -> None:
        torch.cuda.memory._record_memory_history("all", context=None, device=self._device, clear_history=True)

    def events(self) -> list[tuple[int, int]]:
        """Return (address, bytes as asked for) of each event so far; a free has negative bytes."""
        signs = {"alloc": 1, "free_requested": -1}
        history = torch.cuda.memory._snapshot(self._device)["device_traces"][self._device]
        return [(e["addr"], signs[e["action"]] * e["size"]) for e in history if e["action"] in signs]

    def stop(self) -> None:
        torch.cuda.memory._record_memory_history(None, device=self._device)


@contextmanager
def _quiet_first_profile() -> Iterator[None]:
    """Keep Kineto, which reads this variable in a process's first profile, from printing a line per start and stop."""
    if "KINETO_LOG_LEVEL" in os.environ:
        yield
        return
    os.environ["KINETO_LOG_LEVEL"] = "6"
    try:
        yield
    finally:
        del os.environ["KINETO_LOG_LEVEL"]


_LOG_ERROR = 2


@contextmanager
def quiet_allocator() -> Iterator[None]:
    """Silence C++ log warnings: the allocator prints one per thousand frees of memory that its trace does not know.

    No Python function sets this level after import. Where the symbol is missing (glog builds), nothing is silenced.
    """
    try:
        library = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libc10.*"))))
        level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, StopIteration, ValueError):
        yield
        return
    before = level.value
    level.value = max(before, _LOG_ERROR)
    try:
        yield
    finally:
        level.value = before
