"""Time several settings in turns on one model, in rounds: noise of the machine affects all of them alike.

NOTE [ Rules of a race ]
1. The reference runs before and after each group of contestants; a time counts as its ratio to the mean of these two.
2. Contestants to be compared with each other form one group, and run close together in time.
3. The order of groups, and the order within each group, is random in each round.
4. Reference cycles are collected before each timed step: no step pays for the previous one. Within a step the garbage
   collector runs as in training.
5. Results are medians of these ratios over rounds, with the 20th and 80th percentile.

The machine is named here, and its allocator and Python's garbage collector are kept out of measured times. Imports no torch.
"""

import ctypes
import gc
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field
from typing import Generic, TypeVar

from recollect.costs.hardware_table import processor_model

# Constants from glibc's <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def processor_name() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{processor_model()}, {cores} cores"


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory, and return whether that was possible.

    By default glibc returns the memory of each large tensor to the kernel, and the next tensor faults it in again, zeroed.
    Measured times would then contain page faults, more of them in steps that allocate more often.
    """
    if not sys.platform.startswith("linux") or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_TRIM_THRESHOLD, -1)) and bool(mallopt(_M_MMAP_MAX, 0))


@contextmanager
def few_objects() -> Iterator[None]:
    """Exclude all current objects (PyTorch itself) from garbage collection and from meters in a with-block.

    Otherwise each collection takes longer than a small step. Create tensors whose peak is to be measured inside the block.
    What others have excluded stays so.
    """
    is_ours = not gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if is_ours:
            gc.unfreeze()


@dataclass(eq=False, kw_only=True)
class Contestant:
    """A participant of a race, with its times."""

    name: str
    seconds: list[float] = field(default_factory=list)
    ratios: dict[tuple[int, int], float] = field(default_factory=dict)
    """Step time over the adjacent reference times, by round and by the index of its group."""

    def percentile(self, percent: int) -> float:
        """Return a percentile of the slowdown over the rounds; 0.1 is 10 %."""
        return percentile(list(self.ratios.values()), percent) - 1

    @property
    def slowdown(self) -> float:
        return self.percentile(50)


def percentile(values: Sequence[float], percent: int) -> float:
    if percent == 50 or len(values) < 2:
        return statistics.median(values)
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


One = TypeVar("One", bound=Contestant)


@dataclass(eq=False)
class Race(Generic[One]):
    """Rounds of timed steps; `seconds` says None of a step that could not run."""

    reference: Callable[[], float]
    seconds: Callable[[One], float | None]
    report: Callable[[str], None] = field(kw_only=True)
    seed: InitVar[int] = field(kw_only=True)
    reference_s: list[float] = field(default_factory=list, init=False)
    num_rounds: int = field(default=0, init=False)
    is_interrupted: bool = field(default=False, init=False)

    def __post_init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def run(self, groups: Sequence[Sequence[One]], *, seconds: float, least_rounds: int) -> None:
        """Run as many rounds as fit into `seconds`, but at least `least_rounds`; Ctrl+C ends this and all later calls."""
        if self.is_interrupted or not groups:
            return
        begin, num_done = time.perf_counter(), 0
        try:
            with few_objects():
                while True:
                    elapsed_s = time.perf_counter() - begin
                    if num_done >= max(1, least_rounds) and elapsed_s + elapsed_s / num_done > seconds:
                        return
                    self._round(groups)
                    num_done += 1
                    elapsed_s = time.perf_counter() - begin
                    self.report(f"round {num_done}, {elapsed_s:.0f} s of {max(seconds, elapsed_s):.0f} s")
        except KeyboardInterrupt:
            self.is_interrupted = True
            self.report("interrupted: continuing with the results so far")

    def _round(self, groups: Sequence[Sequence[One]]) -> None:
        before_s = self.reference()
        self.reference_s.append(before_s)
        for place in self._random.sample(range(len(groups)), len(groups)):
            turn = self._random.sample(list(groups[place]), len(groups[place]))
            taken = [(contestant, self.seconds(contestant)) for contestant in turn]
            after_s = self.reference()
            for contestant, step_s in taken:
                if step_s is not None:
                    contestant.seconds.append(step_s)
                    contestant.ratios[self.num_rounds, place] = step_s / ((before_s + after_s) / 2)
            self.reference_s.append(after_s)
            before_s = after_s
        self.num_rounds += 1
