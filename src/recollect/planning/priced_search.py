"""Improve the best candidate of `planning/chain_solver.py` for models with values alive until the loss.

Drop the same outputs, and solve a chain that tells forward bytes from backward bytes (`planning/priced_chain.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

from recollect.planning.alive_until_loss import held_values, with_held
from recollect.planning.candidate import Candidate
from recollect.planning.hull import Option
from recollect.planning.known_costs import KnownCosts
from recollect.planning.option_table import OptionsOf, OptionTable
from recollect.planning.output_choices import single_outputs
from recollect.planning.priced_chain import PricedChain
from recollect.plans.action import Action
from recollect.profile.graph import UnitGraph
from recollect.profile.profile import Profile
from recollect.simulation.peak_sums import PeakSums
from recollect.simulation.windows import Window

__all__ = ["PricedSearch"]

# Identical layers share simulations; more would only measure units that run once, whose options hardly matter.
_MOST_PROBES = 12


class PricedSearch:
    """Searches the priced chains of one profile, remembering the cost of every candidate.

    Args:
        profile: the recorded step.
        windows: the windows of this profile.
        peak_sums: computes the cost of plans, in these windows.
        options_of: returns the options of a unit, before varying the held values.
    """

    def __init__(self, profile: Profile, windows: Sequence[Window], peak_sums: PeakSums, options_of: OptionsOf) -> None:
        self.profile = profile
        self._windows = windows
        self._peak_sums = peak_sums
        self._held = held_values(profile)
        held_of = dict(zip(profile.graphs, self._held, strict=True))

        def options_with_held(graph: UnitGraph, *, output: Action = Action.KEEP) -> tuple[Option, ...]:
            return with_held(graph, options_of(graph, output=output), held_of[graph], output=output)

        self._options_of = cache(options_with_held)
        self._chains: dict[frozenset[str], tuple[KnownCosts, PricedChain]] = {}

    @property
    def is_worthwhile(self) -> bool:
        """Return whether layers save values that are alive until the loss."""
        graphs = self.profile.graphs
        return any(
            graphs[call.graph].values[v].saved and not graphs[call.graph].values[v].is_output
            for call in self.profile.calls
            if call.repeated
            for v in self._held[call.graph]
        )

    def run(self, start: Candidate, budget_bytes: int) -> None:
        """Search for faster candidates that drop the same outputs as a given one.

        Args:
            start: a candidate within the budget.
            budget_bytes: limit on the peak of the whole step.
        """
        dropped = start.table.drops_outputs
        if dropped not in self._chains:
            self._chains[dropped] = self._new_chain(dropped)
        costs, chain = self._chains[dropped]
        best = costs.candidate(costs.table.choice_of(start.fates))
        for found in chain.best(budget_bytes):
            if found.peak_bytes <= budget_bytes and found.recompute_s < best.recompute_s:
                best = found
        for _ in chain.better(best, budget_bytes):
            pass

    def known(self) -> Iterator[Candidate]:
        """Yield all candidates so far."""
        for costs, _ in self._chains.values():
            yield from costs.known()

    def _new_chain(self, dropped: frozenset[str]) -> tuple[KnownCosts, PricedChain]:
        table = OptionTable(
            self.profile,
            dropped_outputs=dropped,
            options_of=self._options_of,
            free_outputs=single_outputs(self.profile),
        )
        costs = KnownCosts(self._peak_sums, table)
        chain = PricedChain(table, self._windows, costs.candidate, held=self._held, most_probes=_MOST_PROBES)
        return costs, chain
