"""Define a candidate, an option for every unit with the exact cost, which is computed once for each choice.

Solvers find candidates; the best becomes the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from recollect.planning.hull import Option
from recollect.planning.option_table import Choice, OptionTable
from recollect.simulation.decisions import CallActions
from recollect.simulation.peak_sums import Peaks, PeakSums


@dataclass(frozen=True, slots=True)
class Candidate:
    """One option for each row of a table, and the cost of the step with them.

    Attributes:
        table: all options.
        choice: the chosen option of each row.
        cost: exact peaks and recompute time.
    """

    table: OptionTable
    choice: Choice
    cost: Peaks

    @property
    def peak_bytes(self) -> int:
        """Return the peak of the whole step."""
        return self.cost.peak_bytes

    @property
    def recompute_s(self) -> float:
        """Return the seconds that recompute adds to the step."""
        return self.cost.recompute_s

    @property
    def options(self) -> list[Option]:
        """Return the chosen option of each row."""
        return self.table.options(self.choice)

    def excess_bytes(self, budget_bytes: int) -> int:
        """Return the bytes by which the peak exceeds a budget, at least 0."""
        return max(0, self.peak_bytes - budget_bytes)

    def decisions(self) -> list[CallActions]:
        """Return what each call of the profile drops."""
        return self.table.decisions(self.choice)


class KnownCosts:
    """Makes candidates of choices of one table, and remembers their exact costs, so that each is computed once.

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
