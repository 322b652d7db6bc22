"""Contestants of the benchmarks: ways to recompute, timed against the step without recompute.

The rules are in `recollect.lab.bench.race`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from recollect import Plan
from recollect.lab.bench import race
from recollect.lab.bench.race import percentile
from recompute import Recompute
from results_csv import Number
from subject import Step, first_difference, largest_difference

__all__ = ["TIMES_FURTHER", "Contestant", "Race", "check_gradients", "percentile", "reason"]

# How many times the difference between two plain steps a gradient may differ, if plain steps are not deterministic:
# on CUDA, the backward of fused attention adds with atomics.
TIMES_FURTHER = 4


def reason(error: BaseException) -> str:
    """Format an error for a row: its type and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:120]}"


@dataclass(eq=False, kw_only=True)
class Contestant(race.Contestant):
    """A way to run the step, and its measurements.

    Attributes:
        differs_at: the first gradient whose bits differ from the plain step's; None if none does.
        difference: the largest difference of a gradient relative to its largest entry.
        compile_s: seconds of the first step, which compiled something; 0 if none did.
        plan: the plan, for recollect's contestants.
    """

    recompute: Recompute
    plan: Plan | None = None
    peak_bytes: int = 0
    differs_at: str | None = None
    difference: float = 0.0
    compile_s: float = 0.0

    def time_ratios_to(self, other: race.Contestant) -> list[float]:
        """Return its time over the other's wherever both were in one group; the reference cancels out."""
        return [self.ratios[turn] / other.ratios[turn] for turn in self.ratios if turn in other.ratios]

    def numbers(self, metric: str = "slowdown", name: str | None = None) -> list[Number]:
        """Return rows with the median time, its number of rounds and percentiles; none if not timed."""
        if not self.ratios:
            return []
        name = self.name if name is None else name
        rows = [Number(metric, "1", name, self.slowdown), Number("rounds", "1", name, len(self.ratios))]
        return [*rows, *(Number(f"{metric}_p{p}", "1", name, self.percentile(p)) for p in (20, 80))]


class Race(race.Race[Contestant]):
    """Rounds of timed steps on one model."""

    def __init__(self, step: Step, report: Callable[[str], None]) -> None:
        self.step = step

        def seconds(contestant: Contestant) -> float:
            with contestant.recompute.on():
                return step.seconds()

        super().__init__(step.seconds, seconds, report=report, seed=step.flags.seed)

    @property
    def plain_s(self) -> list[float]:
        """Times of the step without recompute."""
        return self.reference_s


def check_gradients(step: Step, contestants: Sequence[Contestant]) -> None:
    """Warm up, and raise if a contestant computes other gradients.

    Raises:
        RuntimeError: a gradient of a contestant has not the bits that it has in the plain step; or, where the plain step does
            not have the same bits each time, is much further off than these are from each other.
    """
    expected = step.gradients()
    again = step.gradients(copied=False)
    bound = 0.0
    if first_difference(expected, again) is not None:
        rounding = max(torch.finfo(tensor.dtype).eps for tensor in expected.values())
        bound = TIMES_FURTHER * max(rounding, largest_difference(expected, again))
    for one in contestants:
        with one.recompute.on():
            got = step.gradients(copied=False)
        difference = first_difference(expected, got)
        # Not "larger than the bound", which is false for NaN.
        if difference is not None and not largest_difference(expected, got) <= bound:
            raise RuntimeError(f"{one.name}: the gradient of {difference} differs from that of the plain step.")
