"""Measured times of steps under a plan, and of the recompute in them."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from recollect.measuring.stopwatch import Stopwatch


class Timed(NamedTuple):
    """Median seconds of steps under a plan, and of what their backward ran again: on the host, and as the step goes."""

    num_steps: int
    step_s: float
    rerun_host_s: float
    rerun_s: float
    tape_s: float
    """Of the tape in forward, as predicted; 0 on a device, where it may not show."""

    @property
    def slowdown(self) -> float:
        """What recompute adds to the step without it."""
        added_s = self.rerun_s + self.tape_s
        return added_s / (self.step_s - added_s) if self.step_s > added_s else math.inf

    def __str__(self) -> str:
        tape = f", and {1e3 * self.tape_s:.1f} ms of the tape in forward as predicted" if self.tape_s else ""
        return (
            f"{self.slowdown:+.1%}: of {1e3 * self.step_s:.1f} ms, {1e3 * self.rerun_s:.1f} ms run again{tape} "
            f"(medians of {self.num_steps} steps)"
        )


@dataclass
class Timing:
    """Times of one plan so far."""

    num_steps: int = 0
    watches: list[tuple[Stopwatch, Stopwatch]] = field(default_factory=list)
    """Of each timed step: the whole step, and the ops that its backward reran."""
    found: Timed | None = None
    """None while too few steps were timed."""
