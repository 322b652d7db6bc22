"""The seam between a budget and a plan: what the planner asks of a solver, and the solvers that there are.

A solver is made once for a profile and remembers what it measured, so that the next budget is planned faster. The contract
in `tests/unit/planning/test_solvers.py` runs over all of `SOLVERS`.
"""

from __future__ import annotations

from typing import Protocol

from recollect.planning.candidate import Candidate
from recollect.planning.chain_solver import ChainSolver
from recollect.profile.profile import Profile

__all__ = ["SOLVERS", "Solver"]


class Solver(Protocol):
    """Finds candidates for any number of budgets; deterministic, without limits in wall-clock time.

    Args:
        profile: a recorded step with its events.
    """

    def __init__(self, profile: Profile) -> None: ...

    def best(self, budget_bytes: int, enough_s: float) -> Candidate | None:
        """Return the fastest candidate within the budget that is found, or None.

        Args:
            budget_bytes: for the peak of the whole step.
            enough_s: seconds of recompute that are good enough to end the search.
        """

    def leanest(self) -> Candidate | None:
        """Return the candidate with the least peak that is found; the same whatever was asked before."""


SOLVERS: tuple[type[Solver], ...] = (ChainSolver,)
"""In the order in which the planner asks them; it takes the best answer."""
