"""Find the fastest candidate within a budget by searching which layer outputs to drop, with one chain per choice.

For each number of dropped outputs, try a few choices of which (`planning/output_choices.py`). Chains share
measurements, so one simulation and one run of the chain's program (`planning/chain.py`) estimate a choice; only the
best get candidates. The number doubles from 1, then is refined around the best.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, cached_property, partial

from recollect.planning.chain import Chain, WorkingSets
from recollect.planning.lean_search import LeanSearch
from recollect.planning.option_table import Candidate, KnownCosts, OptionsOf, OptionTable, with_options
from recollect.planning.output_choices import (
    first_outputs,
    folded_outputs,
    most_folded,
    number_between,
    single_outputs,
)
from recollect.planning.priced_search import PricedSearch
from recollect.planning.unit_options import unit_options, working_bytes
from recollect.plans.action import Action
from recollect.profile.profile import Profile
from recollect.simulation.peak_sums import PeakSums
from recollect.simulation.program import Program
from recollect.simulation.windows import most_alive, windows

# The most events to play for measuring working sets: about 0.1 s.
_PROBED_EVENTS = 320_000
_FEWEST_PROBES = 12
# With many units, mixing options across them replaces finer options within each.
_OPTIONS_OF_ALL_UNITS = 768
_FEWEST_OPTIONS = 16
# Each of these is a column of a linear program, and measured in fewer simulations: more gave no faster plans.
_MOST_OPTIONS_OF_SEVERAL_RUNS = 32
# Numbers of dropped outputs to try between the best and its neighbors.
_MOST_REFINEMENTS = 3
# Segment lengths in layers to try at the front, besides segments that balance outputs and workspace.
_LONGEST_SEGMENTS = (2, 3)
# Choices of dropped outputs to make candidates for.
_MOST_FULL_RUNS = 3

Dropped = frozenset[str] | None
"""Paths of units whose output is dropped, apart from single units, which choose for themselves. None: no unit drops its
output, so that a unit that keeps everything stays off the tape."""

Score = tuple[int, float]
"""Bytes over the budget, then recompute seconds; lower is better."""


class ChainSolver:
    """Solves for one profile with chains, remembering the cost of every candidate.

    Args:
        profile: a recorded step with its events.
        program: see `Solver`.
        like: a solver of the same profile to share options and simulated units with; its results do not change.
        lean: a candidate that the solver knows from the start, and whose options it has, too.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        program: Program | None = None,
        like: ChainSolver | None = None,
        lean: Candidate | None = None,
    ) -> None:
        self.profile = profile
        self._peak_sums: PeakSums = like._peak_sums if like else PeakSums(program or Program(profile, windows(profile)))
        self._windows = self._peak_sums.windows
        num_events = profile.log.num_events or 1
        self._most_probes = max(_FEWEST_PROBES, _PROBED_EVENTS // num_events)
        # Hulls and options are the same for every chain.
        num_units = len({call.path for call in profile.calls})
        self._runs_several = num_units < len(profile.calls)
        most_options = max(_FEWEST_OPTIONS, _OPTIONS_OF_ALL_UNITS // max(1, num_units))
        if self._runs_several:
            most_options = min(most_options, _MOST_OPTIONS_OF_SEVERAL_RUNS)
        self._options_of: OptionsOf = (
            like._options_of if like else cache(partial(unit_options, most_options=most_options))
        )
        self._lean = lean
        if lean is not None:
            self._options_of = with_options(self._options_of, lean.table, lean.options)
        self._most_dropped = most_folded(profile)
        self._working: WorkingSets = {}
        self._has_tape_s = any(graph.tape_s for graph in profile.graphs)
        self._chains: dict[Dropped, tuple[KnownCosts, Chain]] = {}
        self._priced = PricedSearch(profile, self._windows, self._peak_sums, self._options_of)

    @cached_property
    def _num_alive(self) -> dict[str, int]:
        """How many calls of each unit keep their output at once."""
        return most_alive(self.profile, self._windows)

    @cached_property
    def _working_bytes(self) -> list[int]:
        """Workspace for recomputing each layer."""
        leanest = {call.graph: 0 for call in self.profile.calls}
        for number in {call.graph for call in self.profile.calls if call.repeated}:
            graph = self.profile.graphs[number]
            leanest[number] = working_bytes(graph, self._options_of(graph, output=Action.RECOMPUTE)[0])
        return [leanest[call.graph] for call in self.profile.calls]

    @cached_property
    def _leanest(self) -> Candidate:
        return LeanSearch(self.profile, self._windows, self._peak_sums).found()

    @cached_property
    def _near_least(self) -> ChainSolver:
        """A solver whose options include the leanest candidate's."""
        return ChainSolver(self.profile, like=self, lean=self._leanest)

    def leanest(self) -> Candidate:
        """Return the candidate with the lowest peak; see `Solver`."""
        return self._leanest

    def measured(self) -> tuple[OptionTable, Chain]:
        """Return the options of units that keep their outputs, and what was measured of them."""
        costs, chain = self._chain(frozenset())
        return costs.table, chain

    def best(self, budget_bytes: int, enough_s: float) -> Candidate | None:
        """Return the fastest candidate found within the budget, or None; see `Solver`."""
        found = self._searched(budget_bytes, enough_s)
        if found is not None or budget_bytes < self._leanest.peak_bytes:
            return found
        # Having seen plans as lean as can be, the chains find faster ones.
        self._near_least._searched(self._leanest.peak_bytes, 0.0)
        return self._near_least._searched(budget_bytes, enough_s)

    def _searched(self, budget_bytes: int, enough_s: float) -> Candidate | None:
        goal = (0, enough_s)
        if self._lean is not None:
            self._run(self._lean.table.drops_outputs, budget_bytes)
        if self._has_tape_s and self._run(None, budget_bytes) <= goal:
            return self._best_known(budget_bytes)
        score = self._run(frozenset(), budget_bytes)
        if score > goal:
            for dropped in self._promising(budget_bytes)[:_MOST_FULL_RUNS]:
                dropped_score = self._run(dropped, budget_bytes)
                is_slower = dropped_score > score
                score = min(score, dropped_score)
                # With several calls in flight a chain says little of outputs that are dropped: the first one tells.
                if score <= goal or (is_slower and self._runs_several):
                    break
        best = self._best_known(budget_bytes)
        if best is not None and score > goal and self._priced.is_worthwhile:
            self._priced.run(best, budget_bytes)
        priced = [candidate for candidate in self._priced.known() if candidate.peak_bytes <= budget_bytes]
        found = min(priced, key=_by_time, default=None)
        if best is None or (found is not None and found.recompute_s < best.recompute_s):
            return found
        return best

    def _promising(self, budget_bytes: int) -> list[frozenset[str]]:
        """Return choices of outputs to drop, the most promising first."""
        estimates: dict[frozenset[str], tuple[float, int]] = {}
        number = 1
        while number <= self._most_dropped:
            self._add_estimates(number, budget_bytes, estimates)
            number = min(2 * number, max(self._most_dropped, number + 1))
        for _ in range(_MOST_REFINEMENTS if estimates else 0):
            best_number = len(min(estimates, key=lambda dropped: estimates[dropped]))
            between = number_between(sorted({len(dropped) for dropped in estimates}), best_number)
            if between is None:
                break
            self._add_estimates(between, budget_bytes, estimates)
        return sorted(estimates, key=lambda dropped: (estimates[dropped], len(dropped), sorted(dropped)))

    def _add_estimates(
        self, number: int, budget_bytes: int, estimates: dict[frozenset[str], tuple[float, int]]
    ) -> None:
        """Estimate choices of `number` outputs: seconds by the chain's model, then the lowest known peak."""
        choices = {
            folded_outputs(self.profile, self._working_bytes, num_dropped=number, num_alive=self._num_alive),
        }
        choices |= {first_outputs(self.profile, longest=longest, num_dropped=number) for longest in _LONGEST_SEGMENTS}
        for dropped in sorted(choices - estimates.keys(), key=sorted):
            costs, chain = self._chain(dropped)
            least_bytes = min(candidate.peak_bytes for candidate in costs.known())
            estimates[dropped] = chain.estimate_s(budget_bytes), least_bytes

    def _run(self, dropped: Dropped, budget_bytes: int) -> Score:
        """Make the candidates of one chain for a budget, and return the best score."""
        costs, chain = self._chain(dropped)
        for _ in chain.best(budget_bytes):
            pass
        return min((candidate.excess_bytes(budget_bytes), candidate.recompute_s) for candidate in costs.known())

    def _chain(self, dropped: Dropped) -> tuple[KnownCosts, Chain]:
        if dropped not in self._chains:
            table = OptionTable(
                self.profile,
                dropped_outputs=dropped or frozenset(),
                options_of=self._options_of,
                free_outputs=frozenset() if dropped is None else single_outputs(self.profile),
            )
            costs = KnownCosts(self._peak_sums, table)
            chain = Chain(table, self._windows, costs.candidate, most_probes=self._most_probes, working=self._working)
            if self._lean is not None and self._lean.table.drops_outputs == dropped:
                chain.correct(costs.candidate(table.choice_of(self._lean.options)))
            self._chains[dropped] = costs, chain
        return self._chains[dropped]

    def _best_known(self, budget_bytes: int) -> Candidate | None:
        """Return the fastest candidate of all chains within the budget."""

        def rank(found: tuple[Dropped, Candidate]) -> tuple[object, ...]:
            dropped, candidate = found
            order = candidate.recompute_s, candidate.peak_bytes
            return (*order, dropped is not None, sorted(dropped or ()), candidate.choice)

        fitting = ((dropped, found) for dropped, found in self._known() if found.peak_bytes <= budget_bytes)
        best = min(fitting, key=rank, default=None)
        return None if best is None else best[1]

    def _known(self) -> Iterator[tuple[Dropped, Candidate]]:
        for dropped, (costs, _) in self._chains.items():
            for candidate in costs.known():
                yield dropped, candidate


def _by_time(candidate: Candidate) -> tuple[object, ...]:
    dropped = sorted(candidate.table.drops_outputs)
    return candidate.recompute_s, candidate.peak_bytes, dropped, candidate.choice
