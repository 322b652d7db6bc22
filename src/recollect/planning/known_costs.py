"""Cache the exact cost of each choice of one table, so that it is computed once."""

from __future__ import annotations

from collections.abc import Iterator

from recollect.planning.candidate import Candidate
from recollect.planning.option_table import Choice, OptionTable
from recollect.simulation.peak_sums import Peaks, PeakSums

__all__ = ["KnownCosts"]


class KnownCosts:
    """Makes candidates of choices, and remembers their costs.

    Args:
        peak_sums: computes the cost of decisions.
        table: the options that choices refer to.
    """

    def __init__(self, peak_sums: PeakSums, table: OptionTable) -> None:
        self.table = table
        self._peak_sums = peak_sums
        self._costs: dict[Choice, Peaks] = {}

    def candidate(self, choice: Choice) -> Candidate:
        """Return the candidate of a choice."""
        if choice not in self._costs:
            self._costs[choice] = self._peak_sums.peaks(self.table.decisions(choice))
        return Candidate(self.table, choice, self._costs[choice])

    def known(self) -> Iterator[Candidate]:
        """Yield all candidates so far."""
        return (Candidate(self.table, choice, cost) for choice, cost in self._costs.items())
