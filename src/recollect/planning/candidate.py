"""Define a candidate, an option for every unit with the exact cost; solvers find them, the best becomes the plan."""

from __future__ import annotations

from dataclasses import dataclass

from recollect.planning.option_table import Choice, Fate, OptionTable
from recollect.simulation.call_actions import CallActions
from recollect.simulation.peak_sums import Peaks

__all__ = ["Candidate"]


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
    def fates(self) -> list[Fate]:
        """Return what becomes of each row's unit."""
        return self.table.fates(self.choice)

    def excess_bytes(self, budget_bytes: int) -> int:
        """Return the bytes by which the peak exceeds a budget, at least 0."""
        return max(0, self.peak_bytes - budget_bytes)

    def decisions(self) -> list[CallActions]:
        """Return what each call of the profile drops."""
        return self.table.decisions(self.choice)
