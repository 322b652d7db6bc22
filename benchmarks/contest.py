"""Contestants take turns on one model, in rounds, so that what disturbs the machine disturbs all of them alike.

NOTE [ Rules of a race ]
1. A step without recompute runs before and after each group of contestants; a time counts as its ratio to the mean of
   these two.
2. Those who are compared with each other stand in one group, so that their ratio is one of neighbours.
3. The order of groups, and the order within each, is drawn anew for each round.
4. Garbage in reference cycles is collected before each timed step, so that nobody pays for the one before. The collector
   runs within the step as it does in training.
5. Reported are medians over rounds of such ratios, with the 20th and 80th percentile.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from recollect import Plan
from recompute import Recompute
from subject import Step


@dataclass(eq=False, kw_only=True)
class Contestant:
    """One way to run the step, and what was measured of it.

    Attributes:
        differs_at: the first gradient that is not that of the plain step bit for bit; None if all are.
        difference: the largest difference of a gradient, over its largest entry.
        plan: recollect's plan, where it is one of recollect's.
        ratios: step time over that of the plain step beside it, by round and by the place of its group in the list.
    """

    name: str
    recompute: Recompute
    plan: Plan | None = None
    peak_bytes: int = 0
    differs_at: str | None = None
    difference: float = 0.0
    ratios: dict[tuple[int, int], float] = field(default_factory=dict)

    def percentile(self, percent: int) -> float:
        """Return a percentile of the slowdown over the rounds; 0.1 is 10 %."""
        return percentile(list(self.ratios.values()), percent) - 1

    @property
    def slowdown(self) -> float:
        """The median slowdown."""
        return self.percentile(50)

    def time_ratios_to(self, other: Contestant) -> list[float]:
        """Return its time over the other's wherever both stood in one group, so that the plain step cancels out."""
        return [self.ratios[turn] / other.ratios[turn] for turn in self.ratios if turn in other.ratios]


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile, between neighbours by proportion."""
    if percent == 50 or len(values) < 2:
        return statistics.median(values)
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


class Race:
    """Rounds of timed steps. `plain_s`: the times of the step without recompute."""

    def __init__(self, step: Step, report: Callable[[str], None]) -> None:
        self.step = step
        self.report = report
        self.plain_s: list[float] = []
        self.num_rounds = 0
        self.is_interrupted = False
        self._random = random.Random(step.flags.seed)

    def run(self, groups: Sequence[Sequence[Contestant]], *, seconds: float, least_rounds: int) -> None:
        """Run as many rounds as the time allows, but no fewer than `least_rounds`; Ctrl+C ends this race and all later."""
        if self.is_interrupted or not groups:
            return
        gc.collect()
        gc.freeze()  # what is there now (PyTorch itself) would make each collection take as long as a small step
        try:
            self._run(groups, seconds, least_rounds)
        except KeyboardInterrupt:
            self.is_interrupted = True
            self.report("interrupted: going on with what there is")
        finally:
            gc.unfreeze()

    def _run(self, groups: Sequence[Sequence[Contestant]], seconds: float, least_rounds: int) -> None:
        begin = time.perf_counter()
        num_done = 0
        while True:
            elapsed_s = time.perf_counter() - begin
            if num_done >= max(1, least_rounds) and elapsed_s + elapsed_s / num_done > seconds:
                return
            self._round(groups)
            num_done += 1
            elapsed_s = time.perf_counter() - begin
            self.report(f"round {num_done}, {elapsed_s:.0f} s of {max(seconds, elapsed_s):.0f} s")

    def _round(self, groups: Sequence[Sequence[Contestant]]) -> None:
        before_s = self.step.seconds()
        self.plain_s.append(before_s)
        for place in self._random.sample(range(len(groups)), len(groups)):
            turn = self._random.sample(list(groups[place]), len(groups[place]))
            seconds = {contestant: self._seconds(contestant) for contestant in turn}
            after_s = self.step.seconds()
            for contestant, step_s in seconds.items():
                contestant.ratios[self.num_rounds, place] = step_s / ((before_s + after_s) / 2)
            self.plain_s.append(after_s)
            before_s = after_s
        self.num_rounds += 1

    def _seconds(self, contestant: Contestant) -> float:
        with contestant.recompute.on():
            return self.step.seconds()
