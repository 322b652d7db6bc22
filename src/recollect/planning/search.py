"""The search over chains: how many layer outputs to drop, with the best plan of each chain for a budget.

For each number of outputs there are a few choices of which (`planning/segments.py`). One simulation and one run of the
chain's program give an estimate of each, since chains share what they measured; for the best ones plans are made and
simulated. Numbers are doubled from 1 on, then refined around the best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from typing import NamedTuple

from recollect.planning.chain import Chain, WorkingSets
from recollect.planning.exhaustive import all_levels, every_plan
from recollect.planning.greedy import Fit
from recollect.planning.hull import Option
from recollect.planning.ladder import Ladder, Levels, OptionsOf
from recollect.planning.menu import every_choice, unit_menu
from recollect.planning.polish import polish
from recollect.planning.priced_search import PricedSearch, remembered_peaks
from recollect.planning.segments import first_outputs, folded_outputs, most_folded, single_outputs
from recollect.plans.action import Action
from recollect.profile.graph import UnitGraph
from recollect.profile.profile import Profile
from recollect.simulation.peak_sums import Peaks, PeakSums, checked
from recollect.simulation.program import Program
from recollect.simulation.simulate import simulate
from recollect.simulation.windows import Window, windows

__all__ = ["ChainSearch"]

# Events that may be played to measure working sets: about 0.1 s.
_PROBED_EVENTS = 320_000
_FEWEST_PROBES = 12
# Among many units, those at different options make up for options that none of them has.
_OPTIONS_OF_ALL_CALLS = 768
_FEWEST_OPTIONS = 16
# The search around a plan that is far from the bound: simulations at least (or it is not worth it), and events.
_FEWEST_TRIALS = 1000
_POLISHING_EVENTS = 300_000
# Numbers of dropped outputs that are tried between the best and its neighbours.
_MOST_REFINEMENTS = 3
# Segments at the front, in layers; beside those that balance outputs and working bytes.
_LONGEST_SEGMENTS = (2, 3)
# Choices of dropped outputs for which plans are simulated.
_MOST_FULL_RUNS = 3

# Attempts at a lower peak than the least one so far, by steps down to this part of it.
_MOST_SQUEEZES = 8
_SMALLEST_SQUEEZE = 0.001
_NO_BUDGET = 2**62

Dropped = frozenset[str] | None
"""Paths of the units whose output is dropped, beside those of single units where that is a choice; None: no output at all,
so that a unit that keeps everything is off the tape."""

Score = tuple[int, float]
"""Bytes over the budget, and seconds of recompute: the less the better."""


class _Found(NamedTuple):
    """A plan, with the sum over what its units hold."""

    ladder: Ladder
    levels: Levels
    peaks: Peaks


class ChainSearch:
    """The chains of one profile, and all that was simulated for them.

    Args:
        profile: a recorded step with its log.
        like: a search for the same profile, whose menus and simulated units this one takes over; what it finds is not
            changed by that.

    Attributes:
        program, peak_sums: of the profile.
    """

    def __init__(self, profile: Profile, *, like: ChainSearch | None = None) -> None:
        self.profile = profile
        self._windows: list[Window] = like._windows if like else windows(profile)
        self.program: Program = like.program if like else Program(profile, self._windows)
        self.peak_sums: PeakSums = like.peak_sums if like else PeakSums(self.program)
        self._num_events = profile.log.num_events or 1
        self._most_probes = max(_FEWEST_PROBES, _PROBED_EVENTS // self._num_events)
        most_values = max((sum(v.producer is not None for v in g.values) for g in profile.graphs), default=0)
        can_enumerate = 2**most_values <= self._most_probes
        # Hulls and menus are the same for every chain.
        menu = partial(
            unit_menu, most_options=max(_FEWEST_OPTIONS, _OPTIONS_OF_ALL_CALLS // max(1, len(profile.calls)))
        )
        self._options_of: OptionsOf = like._options_of if like else cache(every_choice if can_enumerate else menu)
        self._most_dropped = most_folded(profile)
        self._working: WorkingSets = {}
        self._every_plan = every_plan(profile, _POLISHING_EVENTS // self._num_events)
        self._every_found: list[_Found] | None = None
        self._has_tape_s = any(graph.tape_s for graph in profile.graphs)
        self._chains: dict[Dropped, tuple[Ladder, Chain]] = {}
        self._simulated: dict[Dropped, dict[Levels, Peaks]] = {}
        self._priced = PricedSearch(profile, self._windows, self.peak_sums, self._options_of)

    @cached_property
    def _working_bytes(self) -> list[int]:
        """What computing each layer again works in."""
        leanest = {call.graph: 0 for call in self.profile.calls}
        for number in {call.graph for call in self.profile.calls if call.repeated}:
            graph = self.profile.graphs[number]
            leanest[number] = _working_bytes(graph, self._options_of(graph, output=Action.RECOMPUTE)[0])
        return [leanest[call.graph] for call in self.profile.calls]

    def best(self, budget_bytes: int, enough_s: float) -> Fit | None:
        """Return the fastest plan within the budget that was found, or None; `enough_s` of recompute end the search."""
        return self._simulated_again(self._best(budget_bytes, enough_s))

    def _best(self, budget_bytes: int, enough_s: float) -> _Found | None:
        goal = (0, enough_s)
        if self._has_tape_s and self._every_plan is None and self._run(None, budget_bytes, enough_s) <= goal:
            return self._best_known(budget_bytes)
        score = self._run(frozenset(), budget_bytes, enough_s)
        if score > goal:
            if self._every_plan is not None:
                return self._best_of_all(self._every_plan, budget_bytes)
            for dropped in self._promising(budget_bytes)[:_MOST_FULL_RUNS]:
                score = min(score, self._run(dropped, budget_bytes, enough_s))
                if score <= goal:
                    break
        best = self._best_known(budget_bytes)
        if best is not None and score > goal and self._priced.is_worthwhile:
            self._priced.run(best.ladder, best.levels, budget_bytes)
        priced = self._priced.best(budget_bytes)
        if priced is None or (best is not None and best.peaks.recompute_s <= priced[2].recompute_s):
            return best
        return _Found(*priced)

    def _simulated_again(self, found: _Found | None) -> Fit | None:
        """Let the simulator have the last word."""
        if found is None:
            return None
        simulation = simulate(self.profile, found.ladder.decisions(found.levels), program=self.program)
        return Fit(found.ladder, found.levels, checked(simulation, found.peaks))

    def _all_plans(self, ladder: Ladder) -> list[_Found]:
        """Return all plans that there are, of a step that has few of them."""
        if self._every_found is None:
            self._every_found = [
                _Found(ladder, levels, self.peak_sums.peaks(ladder.decisions(levels))) for levels in all_levels(ladder)
            ]
        return self._every_found

    def _best_of_all(self, ladder: Ladder, budget_bytes: int) -> _Found | None:
        """Return the fastest plan within the budget of all that there are."""
        plans = [plan for plan in self._all_plans(ladder) if plan.peaks.peak_bytes <= budget_bytes]
        return min(plans, key=lambda p: (p.peaks.recompute_s, p.peaks.peak_bytes, p.levels), default=None)

    def leanest(self) -> Fit | None:
        """Return the plan with the least peak that is found; the same whatever was planned before."""
        if self._every_plan is not None:
            plans = self._all_plans(self._every_plan)
            return self._simulated_again(min(plans, key=lambda p: (p.peaks.peak_bytes, p.peaks.recompute_s, p.levels)))
        search = ChainSearch(self.profile, like=self)
        search._best(0, 0.0)
        least = search._best_known(_NO_BUDGET, by_peak=True)
        step_bytes = 0 if least is None else (least.peaks.peak_bytes - self.profile.persistent_bytes) // 16
        for _ in range(_MOST_SQUEEZES):
            if least is None or step_bytes <= _SMALLEST_SQUEEZE * least.peaks.peak_bytes:
                break
            found = search._best(least.peaks.peak_bytes - step_bytes, math.inf)
            least = search._best_known(_NO_BUDGET, by_peak=True)
            step_bytes = step_bytes if found else step_bytes // 4
        if least is None:
            return None
        # What the chains have learned of so lean plans shows them faster ones that are as lean.
        return search.best(least.peaks.peak_bytes, 0.0)

    def _promising(self, budget_bytes: int) -> list[frozenset[str]]:
        """Return choices of outputs to drop, the most promising first."""
        estimates: dict[frozenset[str], tuple[float, int]] = {}
        number = 1
        while number <= self._most_dropped:
            self._add_estimates(number, budget_bytes, estimates)
            number = min(2 * number, max(self._most_dropped, number + 1))
        for _ in range(_MOST_REFINEMENTS if estimates else 0):
            best_number = len(min(estimates, key=lambda dropped: estimates[dropped]))
            between = _between(sorted({len(dropped) for dropped in estimates}), best_number)
            if between is None:
                break
            self._add_estimates(between, budget_bytes, estimates)
        return sorted(estimates, key=lambda dropped: (estimates[dropped], len(dropped), sorted(dropped)))

    def _add_estimates(
        self, number: int, budget_bytes: int, estimates: dict[frozenset[str], tuple[float, int]]
    ) -> None:
        """Add choices of so many outputs: seconds by the chain's model, then the peak of the leanest plan."""
        choices = {folded_outputs(self.profile, self._working_bytes, num_dropped=number)}
        choices |= {first_outputs(self.profile, longest=longest, num_dropped=number) for longest in _LONGEST_SEGMENTS}
        for dropped in sorted(choices - estimates.keys(), key=sorted):
            _, chain = self._chain(dropped)
            least_bytes = min(s.peak_bytes for s in self._simulated[dropped].values())
            estimates[dropped] = chain.estimate_s(budget_bytes), least_bytes

    def _run(self, dropped: Dropped, budget_bytes: int, enough_s: float) -> Score:
        """Let one chain, and the search around its best plan, simulate what they find; return the best score."""
        ladder, chain = self._chain(dropped)
        for _ in chain.best(budget_bytes):
            pass
        best = min(self._simulated[dropped].items(), key=lambda k: _score(k[1], budget_bytes))
        most_trials = _POLISHING_EVENTS // self._num_events
        if _score(best[1], budget_bytes) > (0, enough_s) and most_trials >= _FEWEST_TRIALS:
            play = self._simulate_levels(dropped, ladder)
            best = polish(ladder, chain, best, budget_bytes, play, most_trials=most_trials)
        return _score(best[1], budget_bytes)

    def _chain(self, dropped: Dropped) -> tuple[Ladder, Chain]:
        if dropped not in self._chains:
            ladder = Ladder(
                self.profile,
                dropped_outputs=dropped or frozenset(),
                options_of=self._options_of,
                free_outputs=frozenset() if dropped is None else single_outputs(self.profile),
            )
            self._simulated[dropped] = {}
            play = self._simulate_levels(dropped, ladder)
            chain = Chain(ladder, self._windows, play, most_probes=self._most_probes, working=self._working)
            self._chains[dropped] = ladder, chain
        return self._chains[dropped]

    def _simulate_levels(self, dropped: Dropped, ladder: Ladder) -> Callable[[Levels], Peaks]:
        return remembered_peaks(self.peak_sums, ladder, self._simulated[dropped])

    def _best_known(self, budget_bytes: int, *, by_peak: bool = False) -> _Found | None:
        """Return the fastest plan within the budget that any chain has simulated, or the one with the least peak."""
        best: tuple[tuple[float, float, bool, list[str], Levels], Dropped] | None = None
        for dropped, known in self._simulated.items():
            for levels, s in known.items():
                order = (s.peak_bytes, s.recompute_s) if by_peak else (s.recompute_s, s.peak_bytes)
                rank = (*order, dropped is not None, sorted(dropped or ()), levels)
                if s.peak_bytes <= budget_bytes and (best is None or rank < best[0]):
                    best = rank, dropped
        if best is None:
            return None
        (*_, levels), dropped = best
        return _Found(self._chains[dropped][0], levels, self._simulated[dropped][levels])


def _working_bytes(graph: UnitGraph, leanest: Option) -> int:
    return sum(graph.values[v].nbytes for op in leanest.recompute_ops for v in graph.ops[op].outputs)


def _between(numbers: Sequence[int], best: int) -> int | None:
    """Return a number between the best one and the neighbour that is farther away; None if there is none."""
    after = min((n for n in numbers if n > best), default=best)
    before = max((n for n in (0, *numbers) if n < best), default=best)
    other = after if after - best >= best - before else before
    return None if abs(other - best) < 2 else (best + other) // 2


def _score(simulation: Peaks, budget_bytes: int) -> Score:
    return max(0, simulation.peak_bytes - budget_bytes), simulation.recompute_s
