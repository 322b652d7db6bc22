"""Measure the costs of ops while a step is recorded; `modelled_costs.py` is the counterpart for fake tensors.

Ops with the same name and the same argument layouts count as one op. With identical layers this gives a sample per layer,
and the median counts; an op with too few samples for a median runs again at once.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from recollect._torch_functions import without_modes
from recollect._torch_parallel import waited_for
from recollect._torch_private import below_autograd, disable_autocast, keep_busy, tree_map
from recollect.engine.content import has_same_bits
from recollect.engine.facts import OpFacts
from recollect.engine.function_call import FunctionCall
from recollect.engine.function_run import FunctionRun
from recollect.garbage import without_collections
from recollect.measuring.deaths import Deaths
from recollect.measuring.meter import CpuOpPeaks, CudaOpPeaks
from recollect.measuring.timing import timed_by_events, timed_work
from recollect.tensors import has_strides, shape_of, tensors_in

T = TypeVar("T")
Key = tuple[Any, ...]

# With fewer samples, one page fault decides the median; more make recording slow.
_LEAST_SAMPLES = 3
# An op this long does not run again: it is far above the noise, and the user waits.
_LONG_S = 0.5


class RunsAgain:
    """Runs the recipe of a custom autograd Function's call, on the arguments of the call.

    `are_equal`: whether all its results so far had the same bits as in the call. A forward that depends on hidden
    state (a counter, a different library's random numbers) gives different results.
    """

    def __init__(self, run: FunctionRun, call: FunctionCall) -> None:
        self._run = run
        self._call = call
        self.are_equal = True

    @property
    def kind(self) -> tuple[Any, ...]:
        """The key that distinguishes calls with different work: the Function, what requires grad, and the results."""
        needs_grad = tuple(tensor.requires_grad for tensor in tensors_in(self._run.args))
        return (self._run.function, needs_grad, tuple(self._call.layouts))

    @contextmanager
    def as_in_backward(self) -> Iterator[None]:
        """Within the block, `__call__` and `compare` run as backward would run them."""
        with without_modes(), torch.enable_grad(), below_autograd(), disable_autocast():
            yield

    def __call__(self) -> list[Any]:
        """Run it; return its results. Parameters are copied, as backward will have to gather them."""
        return self._call(list(self._run.arguments.tensors), False, torch.clone)

    def compare(self, results: list[Any]) -> None:
        self.are_equal &= all(has_same_bits(made.tensor, results[made.slot]) for made in self._run.made)


@dataclass(frozen=True, slots=True)
class OpRun:
    """One run of an op: `key` identifies the op, `number` is the position among the step's runs, from 0."""

    key: Key
    number: int


class MeasuredCosts:
    """Times each op as it runs, and measures its peak growth of memory."""

    def __init__(self, device: torch.device) -> None:
        self._seconds: dict[Key, list[float]] = {}
        self._numbers: dict[Key, list[int]] = {}
        self._num_runs = 0
        self._device = device
        self._memory = CudaOpPeaks(device) if device.type == "cuda" else CpuOpPeaks()
        self._working_bytes: dict[Key, int] = {}

    @contextmanager
    def recording(self, before: Deaths | None = None) -> Iterator[None]:
        """Measure during the block; with `before`, also the most bytes that the whole process has in the step."""
        with self._memory.recording(before):
            yield
        peaks_bytes = self._memory.peaks_bytes()
        # The first call may allocate lasting memory, so the higher median of all calls counts.
        self._working_bytes = {
            key: statistics.median_high(peaks_bytes[number] for number in numbers)
            for key, numbers in self._numbers.items()
        }

    def run(self, func: Any, facts: OpFacts, args: Any, kwargs: Any, *, may_repeat: bool) -> tuple[Any, OpRun]:
        """Run an op; return its result and the key to its costs.

        `may_repeat`: the op may run some more times; its result is then that of the last run: only one exists.
        """
        key = key_of(func, args, kwargs)
        samples = self._seconds.setdefault(key, [])
        number = self._num_runs
        self._num_runs += 1
        self._numbers.setdefault(key, []).append(number)
        with self._measured():
            output = self._run_once(_awaited(func) if facts.may_replay else func, args, kwargs, samples)
        if may_repeat and not facts.writes and not facts.is_random and not facts.keeps and facts.running_stats is None:
            while len(samples) < _LEAST_SAMPLES and samples[-1] < _LONG_S:
                del output
                output = self._run_once(func, args, kwargs, samples)
        return output, OpRun(key, number)

    def run_function(self, args: Any, inner: Sequence[OpRun], again: RunsAgain, *, is_joint: bool) -> OpRun:
        """Return the key to the costs of a custom autograd Function, which has run the ops `inner`, by running it again.

        `is_joint`: all ranks run it, each time.
        """
        key = key_of(again.kind, args, {})
        samples = self._seconds.setdefault(key, [])
        numbers = self._numbers.setdefault(key, [])
        least = len(samples) + 1 if is_joint else _LEAST_SAMPLES
        while len(samples) < least and (is_joint or not samples or samples[-1] < _LONG_S):
            numbers.append(self._num_runs)
            self._num_runs += 1
            with again.as_in_backward():
                with self._measured():
                    results, function_s = timed_alone(again, self._device)
                again.compare(results)
            samples.append(function_s)
        return OpRun(key, numbers[-1])

    @contextmanager
    def unseen(self) -> Iterator[OpRun]:
        """Measure the memory of code whose ops no mode sees."""
        run = self.begin_unseen()
        try:
            yield run
        finally:
            self.end_unseen()

    def begin_unseen(self) -> OpRun:
        run = OpRun(("unseen", self._num_runs), self._num_runs)
        self._num_runs += 1
        self._seconds[run.key], self._numbers[run.key] = [0.0], [run.number]
        self._memory.begin()
        return run

    def begin_unseen_again(self) -> None:
        """Take the code that is running for code that begins now."""
        self._memory.begin_again()

    def end_unseen(self) -> None:
        self._memory.end()

    def seconds_of(self, run: OpRun | None) -> float:
        return statistics.median(self._seconds[run.key]) if run is not None else 0.0

    def working_bytes_of(self, key: Key | None) -> int:
        """Return the peak growth of an op with this key in bytes, its results included; 0 if none ran."""
        return self._working_bytes.get(key, 0) if key is not None else 0

    @property
    def step_bytes(self) -> int:
        """Most bytes alive in the step, with everything else in memory; 0 on the CPU, unless recorded with `before`."""
        return self._memory.step_bytes

    @contextmanager
    def _measured(self) -> Iterator[None]:
        self._memory.begin()
        try:
            yield
        finally:  # An op with wrong shapes raises, and the step may go on.
            self._memory.end()

    def _run_once(self, func: Any, args: Any, kwargs: Any, samples: list[float]) -> Any:
        with without_collections():
            output, op_s = timed_alone(lambda: func(*args, **kwargs), self._device)
        samples.append(op_s)
        return output


def _awaited(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs a collective until its result is there; the collective itself returns at once."""
    return lambda *args, **kwargs: tree_map(waited_for, collective(*args, **kwargs))


def timed_alone(run: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """Run one op; return its result and the seconds that its kernels take.

    In a step the CPU runs ahead of a CUDA device, so earlier kernels hide the time to launch a kernel. Here the device gets
    other work first, to hide it as well.
    """
    if device.type != "cuda":
        return timed_work(run, device)
    keep_busy(device)
    return timed_by_events(run, device)


def key_of(func: Any, args: Any, kwargs: Any) -> Key:
    """Return a key that is equal for two runs of an op on tensors of the same layouts."""
    return (func, *(_signature(a) for a in args), *(_signature(a) for a in kwargs.values()))


def _signature(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        layout = (argument.stride(), argument.dtype) if has_strides(argument) else ()
        return shape_of(argument), *layout
    if isinstance(argument, (list, tuple)):
        return tuple(_signature(a) for a in argument)
    return argument if isinstance(argument, (int, float, bool, str)) else None
