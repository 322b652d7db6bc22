"""Define the interface between the planner and its solvers, and list the solvers.

A solver is made once per profile and remembers what it measured, which makes later budgets faster. All of `SOLVERS`
must pass the contract in `tests/unit/planning/test_solvers.py`.
"""

from __future__ import annotations

from typing import Protocol

from recollect.planning.candidate import Candidate
from recollect.planning.chain_solver import ChainSolver
from recollect.profile.profile import Profile
from recollect.simulation.program import Program

__all__ = ["SOLVERS", "Solver"]


class Solver(Protocol):
    """Finds candidates for any number of budgets; deterministic, with no wall-clock limit.

    Args:
        profile: a recorded step with its events.
        program: the program of the profile and its windows, to reuse.
    """

    def __init__(self, profile: Profile, *, program: Program | None = None) -> None: ...

    def best(self, budget_bytes: int, enough_s: float) -> Candidate | None:
        """Return the fastest candidate found within the budget, or None; never None if `leanest` is within the budget.

        Args:
            budget_bytes: limit on the peak of the whole step.
            enough_s: recompute seconds that are good enough to end the search.
        """

    def leanest(self) -> Candidate:
        """Return the candidate with the lowest peak found, independent of earlier calls and of the times of ops."""


SOLVERS: tuple[type[Solver], ...] = (ChainSolver,)
"""The solvers, in the order the planner calls them; the best answer wins."""
