"""The quick search along one order of moves: for steps without a log of events, and where the chain finds nothing.

1. The moves of the ladder (`planning/ladder.py`) are ordered by value; a binary search over their number finds the
   longest prefix that fits. Only what was simulated is believed.
2. Moves of the last units come first where the simulator says that they do not raise the peak of the leanest plan.
3. Bytes that are left are offered to the remaining moves, best first.
4. If no plan that keeps every unit's output fits, outputs of chained layers are dropped too, all but every Nth.

Limitations: the order of moves does not know working sets, so at tight budgets a better plan can exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from recollect.planning.hull import unit_hull
from recollect.planning.ladder import Ladder, Levels, Move, OptionsOf
from recollect.planning.segments import dropped_outputs, longest_chain
from recollect.profile.profile import Profile
from recollect.simulation.decisions import Prediction
from recollect.simulation.simulate import CallDecision

__all__ = ["STRIDES", "Fit", "GreedySearch", "Trial"]

STRIDES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Every how many-th layer's output is kept, where not all of them are."""

# Bounds the number of simulations, which is what planning time goes into.
_MOST_FILLING_TRIALS = 16
# Prefixes to try where the leanest plan does not fit: a fatter one can have a smaller working set.
_NUM_PROBES = 8


class Outcome(Protocol):
    """What the search has to know of a plan."""

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at any moment."""

    @property
    def recompute_s(self) -> float:
        """Seconds that recompute adds."""


def _ladders(profile: Profile, options_of: OptionsOf) -> Iterator[Ladder]:
    """Yield the ladder with every output kept, then those that keep every Nth."""
    yield Ladder(profile, options_of=options_of)
    for stride in STRIDES:
        if stride > longest_chain(profile):
            return
        yield Ladder(profile, dropped_outputs=dropped_outputs(profile, stride=stride), options_of=options_of)


@dataclass(frozen=True, slots=True)
class Fit:
    """A choice that was simulated."""

    ladder: Ladder
    levels: Levels
    simulation: Prediction


@dataclass(frozen=True, slots=True)
class Trial:
    """A choice, and what comes of it."""

    ladder: Ladder
    levels: Levels
    outcome: Outcome


class GreedySearch:
    """The search for one budget; remembers the plan with the least peak that it saw.

    Args:
        profile: what to plan for.
        budget_bytes: what the peak must not exceed.
        play: says what comes of decisions for all calls.
    """

    def __init__(self, profile: Profile, budget_bytes: int, play: Callable[[Sequence[CallDecision]], Outcome]) -> None:
        self.profile = profile
        self.budget_bytes = budget_bytes
        self.leanest: Trial | None = None
        self._play = play
        self._tried: dict[tuple[frozenset[str], Levels], Outcome] = {}

    def _try(self, ladder: Ladder, levels: Levels) -> Trial:
        key = (ladder.drops_outputs, levels)
        if key not in self._tried:
            self._tried[key] = self._play(ladder.decisions(levels))
        trial = Trial(ladder, levels, self._tried[key])
        if self.leanest is None or trial.outcome.peak_bytes < self.leanest.outcome.peak_bytes:
            self.leanest = trial
        return trial

    def _fits(self, trial: Trial) -> bool:
        return trial.outcome.peak_bytes <= self.budget_bytes

    def best(self) -> Trial | None:
        """Return the best plan found, or None if none fits."""
        # The hulls are the same for every ladder.
        for ladder in _ladders(self.profile, cache(unit_hull)):
            fit = self.best_on(ladder)
            if fit is not None:
                return fit
        return None

    def best_on(self, ladder: Ladder) -> Trial | None:
        """Return the best plan found on one ladder, or None if none fits."""
        leanest = self._try(ladder, ladder.leanest)
        if not self._fits(leanest) and ladder.drops_outputs:
            return None
        moves = ladder.free_moves_first(lambda levels: self._try(ladder, levels).outcome.peak_bytes)
        if self._fits(leanest):
            return self._filled(self._longest_prefix(leanest, 0, moves), moves)
        for probe in range(1, _NUM_PROBES):
            number = len(moves) * probe // _NUM_PROBES
            fit = self._try(ladder, ladder.climb(ladder.leanest, moves[:number]))
            if self._fits(fit):
                return self._filled(self._longest_prefix(fit, number, moves), moves)
        return None

    def _longest_prefix(self, fit: Trial, number: int, moves: Sequence[Move]) -> Trial:
        """Return the fit with the most moves, by bisection from a prefix that fits to all moves, which do not."""
        fitting, too_many = number, len(moves) + 1
        while too_many - fitting > 1:
            middle = (fitting + too_many) // 2
            candidate = self._try(fit.ladder, fit.ladder.climb(fit.ladder.leanest, moves[:middle]))
            if self._fits(candidate):
                fitting, fit = middle, candidate
            else:
                too_many = middle
        return fit

    def _filled(self, fit: Trial, moves: Sequence[Move]) -> Trial:
        """Offer the bytes that are left to the moves that were not made, best first."""
        ladder = fit.ladder
        refused: set[tuple[int, int]] = set()
        trials = 0
        for move in moves:
            rung = ladder.rungs[move.rung]
            # What an identical later layer could not keep cannot be kept here: these values live longer. Bytes are no
            # guide: values of the last layers raise the peak by less than their size.
            hopeless = (rung.graph, move.level) in refused or trials >= _MOST_FILLING_TRIALS
            if hopeless or move.level != fit.levels[move.rung] + 1:
                continue
            trials += 1
            candidate = self._try(ladder, ladder.climb(fit.levels, [move]))
            if self._fits(candidate) and candidate.outcome.recompute_s <= fit.outcome.recompute_s:
                fit = candidate
            else:
                refused.add((rung.graph, move.level))
        return fit
