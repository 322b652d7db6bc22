"""What an op costs: measured while a step is recorded. Fake tensors have `modelled_costs.py` instead.

Ops with the same name and the same argument shapes are one op here. With identical layers every op is thus measured once
a layer for free, and the median is taken; an op that ran too seldom for a median is run again on the spot.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from recollect._torch_private import keep_busy
from recollect.engine.facts import OpFacts
from recollect.measuring.timing import timed, timed_by_events
from recollect.measuring.working_memory import CpuWorkingMemory, CudaWorkingMemory

T = TypeVar("T")
Key = tuple[Any, ...]

# A median of fewer samples is at the mercy of a page fault; more make recording slow.
_LEAST_SAMPLES = 3
# An op as long as this is not run again: it is far above the noise, and somebody waits.
_LONG_S = 0.5


@dataclass(frozen=True, slots=True)
class OpRun:
    """One run of an op: which op it was (`key`), and which run of the step, from 0."""

    key: Key
    number: int


class MeasuredCosts:
    """Times each op as it runs, and measures the memory that it works in."""

    def __init__(self, device: torch.device) -> None:
        self._seconds: dict[Key, list[float]] = {}
        self._numbers: dict[Key, list[int]] = {}
        self._num_runs = 0
        self._device = device
        self._memory = CudaWorkingMemory(device) if device.type == "cuda" else CpuWorkingMemory()
        self._working_bytes: dict[Key, int] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Everything between is one step."""
        with self._memory.recording():
            yield
        peaks_bytes = self._memory.peaks_bytes()
        # A first call may set up what stays; the higher median of all calls is what the op takes.
        self._working_bytes = {
            key: statistics.median_high(peaks_bytes[number] for number in numbers)
            for key, numbers in self._numbers.items()
        }

    def run(self, func: Any, facts: OpFacts, args: Any, kwargs: Any, *, may_repeat: bool) -> tuple[Any, OpRun]:
        """Run an op; return its result, and what to ask for its costs with.

        `may_repeat`: running it some more times disturbs nothing (it does when the peak is near).
        """
        key = key_of(func, args, kwargs)
        samples = self._seconds.setdefault(key, [])
        number = self._num_runs
        self._num_runs += 1
        self._numbers.setdefault(key, []).append(number)
        self._memory.begin()
        output = self._run_once(func, args, kwargs, samples)
        self._memory.end()
        if may_repeat and not facts.writes and not facts.is_random and not facts.keeps and facts.running_stats is None:
            while len(samples) < _LEAST_SAMPLES and samples[-1] < _LONG_S:
                self._run_once(func, args, kwargs, samples)
        return output, OpRun(key, number)

    def seconds_of(self, run: OpRun | None) -> float:
        """Return the median time of an op; 0 for one that was not seen to run."""
        return statistics.median(self._seconds[run.key]) if run is not None else 0.0

    def working_bytes_of(self, run: OpRun | None) -> int:
        """Return the most bytes that the op adds while it runs, its results among them; 0 for one that was not seen."""
        return self._working_bytes[run.key] if run is not None else 0

    def _run_once(self, func: Any, args: Any, kwargs: Any, samples: list[float]) -> Any:
        output, op_s = timed_alone(lambda: func(*args, **kwargs), self._device)
        samples.append(op_s)
        return output


def timed_alone(run: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """Run one op; return its result and the seconds that its kernels take.

    In a step the CPU is ahead of a CUDA device, so what it takes to launch a kernel is hidden behind the kernels before. Here
    the device is given something to do first, so that it is hidden as well.
    """
    if device.type != "cuda":
        return timed(run, device)
    keep_busy(device)
    return timed_by_events(run, device)


def key_of(func: Any, args: Any, kwargs: Any) -> Key:
    """Return what two runs of the same op on tensors of the same layout have in common."""
    return (func, *(_signature(a) for a in args), *(_signature(a) for a in kwargs.values()))


def _signature(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return (
            (argument.shape, argument.stride(), argument.dtype) if argument.layout is torch.strided else argument.shape
        )
    if isinstance(argument, (list, tuple)):
        return tuple(_signature(a) for a in argument)
    return argument if isinstance(argument, (int, float, bool, str)) else None
