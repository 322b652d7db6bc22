"""The planner: the plan with the least recompute whose simulated peak is within the budget.

1. The moves of the ladder (`planning/ladder.py`) are ordered by value; a binary search over their number finds the
   longest prefix that fits. Only what was simulated is believed: a plan over the budget is never returned.
2. Moves of the last units come first where the simulator says that they do not raise the peak of the leanest plan.
3. Bytes that are left are offered to the remaining moves, best first.
4. Full recompute of the layers alone is tried too, whose working set can be smaller than that of the leanest plan.
5. If no plan that keeps every unit's output fits, outputs of chained layers are dropped too, all but every Nth.

Limitations: the order of moves does not know working sets, so at tight budgets a better plan can exist. No bound yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from recollect.errors import BudgetTooSmallError
from recollect.plan import Plan
from recollect.planning.classic import classic_plan
from recollect.planning.decisions import Prediction, Simulate, simulated_plan
from recollect.planning.ladder import Ladder, Levels, Move
from recollect.planning.segments import dropped_outputs, longest_chain
from recollect.planning.simulate import CallDecision
from recollect.planning.simulate import simulate as simulate_step
from recollect.profile.graph import Profile
from recollect.quantities import parse_budget

__all__ = ["plan"]

_STRIDES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
# Bounds the number of simulations, which is what planning time goes into.
_MOST_FILLING_TRIALS = 16
# Prefixes to try where the leanest plan does not fit: a fatter one can have a smaller working set.
_NUM_PROBES = 8


def plan(profile: Profile, budget: int | str, *, simulate: Simulate = simulate_step) -> Plan:
    """Choose what to keep so that the peak of the whole step is within a budget, at the least recompute.

    Args:
        profile: the recorded step.
        budget: bytes for the whole step (parameters, gradients, optimizer state, kept values, working memory): an int,
            or text such as "16GiB", "80GB", or "60%" of the peak of the step that keeps everything.
        simulate: predicts the peak and the recompute time of a choice.

    Returns:
        A plan with `predicted_peak_bytes <= budget_bytes`, the same for every run.

    Raises:
        BudgetTooSmallError: no plan that is tried fits; carries the least peak and the unit that needs it.
        QuantityError: the budget is no number of bytes.

    Complexity: about 20 to 40 simulations, and one hull per distinct unit.

    Example:
        >>> from types import SimpleNamespace
        >>> from recollect.profile.graph import OpRecord, StepLog, UnitCall, UnitGraph, ValueRecord
        >>> values = (ValueRecord("x", 8, producer=None), ValueRecord("mul", 64, producer=0, saved=True))
        >>> layer = UnitGraph(values, (OpRecord("mul", (0,), (1,), 0.5),))
        >>> profile = Profile((layer,), (UnitCall("layers.0", 0, repeated=True),), StepLog(), step_s=2.0)
        >>> def simulate(profile, decisions):
        ...     num_dropped = len(decisions[0].recompute)
        ...     return SimpleNamespace(peak_bytes=96 - 64 * num_dropped, recompute_s=0.5 * num_dropped)
        >>> print(plan(profile, "40 B", simulate=simulate))
        layers.0    recompute all
        all others  keep all
        predicted peak 32 B, budget 40 B; predicted slowdown 25.0 %
    """
    keep_all = [CallDecision(recompute=frozenset(), keep_output=True)] * len(profile.calls)
    plain = simulate(profile, keep_all)
    search = _Search(profile, parse_budget(budget, reference_bytes=plain.peak_bytes), simulate, least=plain)
    if plain.peak_bytes <= search.budget_bytes:
        top = Ladder(profile)
        return search.finished(_Fit(top, top.climb(top.leanest, top.moves), plain))
    for ladder in _ladders(profile):
        fit = search.best_on(ladder)
        if fit is not None:
            return search.finished(fit)
    full = classic_plan(profile, "full", simulate=simulate)
    if full.predicted_peak_bytes is not None and full.predicted_peak_bytes <= search.budget_bytes:
        return replace(full, budget_bytes=search.budget_bytes)
    raise BudgetTooSmallError(
        budget_bytes=search.budget_bytes, least_peak_bytes=search.least.peak_bytes, unit=search.least.peak_call
    )


def _ladders(profile: Profile) -> Iterator[Ladder]:
    """Yield the ladder with every output kept, then those that keep every Nth."""
    yield Ladder(profile)
    for stride in _STRIDES:
        if stride > longest_chain(profile):
            return
        yield Ladder(profile, dropped_outputs=dropped_outputs(profile, stride=stride))


@dataclass(frozen=True, slots=True)
class _Fit:
    """A choice that was simulated."""

    ladder: Ladder
    levels: Levels
    simulation: Prediction


class _Search:
    """The search for one budget; remembers the least peak it saw."""

    def __init__(self, profile: Profile, budget_bytes: int, simulate: Simulate, *, least: Prediction) -> None:
        self.profile = profile
        self.budget_bytes = budget_bytes
        self.least = least
        self._simulate = simulate
        self._tried: dict[tuple[frozenset[str], Levels], Prediction] = {}

    def _try(self, ladder: Ladder, levels: Levels) -> _Fit:
        key = (ladder.drops_outputs, levels)
        if key not in self._tried:
            self._tried[key] = self._simulate(self.profile, ladder.decisions(levels))
        simulation = self._tried[key]
        if simulation.peak_bytes < self.least.peak_bytes:
            self.least = simulation
        return _Fit(ladder, levels, simulation)

    def _fits(self, fit: _Fit) -> bool:
        return fit.simulation.peak_bytes <= self.budget_bytes

    def best_on(self, ladder: Ladder) -> _Fit | None:
        """Return the best plan found on one ladder, or None if none fits."""
        leanest = self._try(ladder, ladder.leanest)
        if not self._fits(leanest) and ladder.drops_outputs:
            return None
        moves = ladder.free_moves_first(lambda levels: self._try(ladder, levels).simulation.peak_bytes)
        if self._fits(leanest):
            return self._filled(self._longest_prefix(leanest, 0, moves), moves)
        for probe in range(1, _NUM_PROBES):
            number = len(moves) * probe // _NUM_PROBES
            fit = self._try(ladder, ladder.climb(ladder.leanest, moves[:number]))
            if self._fits(fit):
                return self._filled(self._longest_prefix(fit, number, moves), moves)
        return None

    def _longest_prefix(self, fit: _Fit, number: int, moves: Sequence[Move]) -> _Fit:
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

    def _filled(self, fit: _Fit, moves: Sequence[Move]) -> _Fit:
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
            if self._fits(candidate) and candidate.simulation.recompute_s <= fit.simulation.recompute_s:
                fit = candidate
            else:
                refused.add((rung.graph, move.level))
        return fit

    def finished(self, fit: _Fit) -> Plan:
        """Return the plan of a fit, with its prediction."""
        chosen = fit.ladder.plan(fit.levels, budget_bytes=self.budget_bytes)
        return simulated_plan(self.profile, chosen, fit.simulation)
