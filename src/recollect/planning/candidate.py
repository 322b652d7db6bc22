"""A choice for every unit of a step, with its cost: what solvers look for and the planner makes plans of."""

from __future__ import annotations

from dataclasses import dataclass

from recollect.planning.option_table import Choice, OptionTable
from recollect.simulation.call_actions import CallActions
from recollect.simulation.peak_sums import Peaks

__all__ = ["Candidate"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A choice of one option for each row of a table, and the cost of the step under it.

    Attributes:
        table: the options that there are.
        choice: for each row, the option chosen.
        cost: the exact peaks and the recompute time.
    """

    table: OptionTable
    choice: Choice
    cost: Peaks

    @property
    def peak_bytes(self) -> int:
        """Peak of the whole step."""
        return self.cost.peak_bytes

    @property
    def recompute_s(self) -> float:
        """Seconds that recompute adds to the step."""
        return self.cost.recompute_s

    def excess_bytes(self, budget_bytes: int) -> int:
        """Return the bytes by which the peak exceeds a budget, 0 if it does not."""
        return max(0, self.peak_bytes - budget_bytes)

    def decisions(self) -> list[CallActions]:
        """Return what each of the profile's calls drops."""
        return self.table.decisions(self.choice)
