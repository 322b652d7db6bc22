"""Make the plan for a budget: search, check and fall back.

1. All solvers (`SOLVERS`) search for the candidate with the least recompute whose peak is within the budget.
2. The bound (`planning/bound.py`) says how much faster any plan could be, and so when to stop.
3. The simulator has the last word: no plan over its budget is returned.
4. If no solver finds a plan, try full recompute of the layers; if that does not fit either, the error names the lowest
   peak that is known. It depends on bytes alone, and a budget of so much has a plan.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Protocol

from recollect.arguments import check_kind
from recollect.errors import BudgetTooSmallError, ProfileFormatError
from recollect.planning.advice import advice
from recollect.planning.bound import LowerBound, check_bound, is_all_on_tape
from recollect.planning.chain_solver import ChainSolver
from recollect.planning.classic import classic_plan
from recollect.planning.option_table import Candidate, OptionTable
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile
from recollect.quantities import parse_budget
from recollect.simulation.decisions import CallActions, decide
from recollect.simulation.peak_sums import checked
from recollect.simulation.program import Program
from recollect.simulation.simulate import Simulation, simulate, simulated_plan
from recollect.simulation.windows import windows

# Stop searching this close to the bound: a fraction of the bound itself, and one of the step.
_SMALL_GAP = 0.01
_SMALL_GAP_OF_STEP = 0.001


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


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage in a with-block or function, in any thread.

    A planner makes many small objects that refer to each other and soon go by their reference counts. Collections would find
    next to nothing, and take half of the time: there are as many as objects are made, each looks at all of a large step.

    Example:
        >>> with without_collections():
        ...     gc.isenabled()
        False
        >>> gc.isenabled()
        True
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Planner:
    """Plans one profile for any number of budgets, reusing computation from one to the next.

    Args:
        profile: the recorded step.
        make_bound: makes a bound on its plans, for who knows more of the step; called when a budget asks for it.

    Raises:
        ProfileFormatError: as `recollect.plan`.

    Example:
        >>> import torch, recollect
        >>> from recollect.lab.models.architectures import llama_config
        >>> from recollect.lab.models.gpt import GPTModel
        >>> model = GPTModel(llama_config(num_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=64))
        >>> tokens = torch.randint(0, 64, (1, 16))
        >>> planner = Planner(recollect.record(model, {"tokens": tokens, "labels": tokens}, fake=True))
        >>> plans = [planner.plan(budget) for budget in ("100%", "98%")]
        >>> plans[0].predicted_slowdown, plans[1].predicted_peak_bytes <= plans[1].budget_bytes
        (0.0, True)
    """

    @without_collections()
    def __init__(self, profile: Profile, *, make_bound: Callable[[], LowerBound] | None = None) -> None:
        check_kind("plan(profile, budget)", "profile", profile, Profile, "recollect.Profile")
        if profile.calls and not profile.log.sequence:
            raise ProfileFormatError(
                f"plan for {profile!r}: got no memory events, expected those of a recorded step, from which peaks are "
                "predicted; record it again"
            )
        self.profile = profile
        self._program = Program(profile, windows(profile))
        self._plain = self._simulate([CallActions()] * len(profile.calls))
        self._make_bound = make_bound or partial(LowerBound, profile)

    @cached_property
    def _solvers(self) -> list[Solver]:
        if not self.profile.calls:
            return []
        found = [solver(self.profile, program=self._program) for solver in SOLVERS]
        if any(graph.parts for graph in self.profile.graphs):
            # A search with more to choose from may find less.
            graphs = tuple(replace(graph, parts=()) for graph in self.profile.graphs)
            found += [solver(replace(self.profile, graphs=graphs)) for solver in SOLVERS]
        return found

    @cached_property
    def _bound(self) -> LowerBound:
        return self._make_bound()

    @property
    def plain_peak_bytes(self) -> int:
        """Return the predicted peak of the step that keeps everything."""
        return self._plain.peak_bytes

    @without_collections()
    def bound_slowdown(self, budget_bytes: int) -> float | None:
        """Return a lower bound on the slowdown of any plan within a budget; inf if no plan fits, None if unknown."""
        if self.profile.step_s <= 0 or not self.profile.calls:
            return None
        return self._bound_s(budget_bytes) / self.profile.step_s

    @without_collections()
    def plan(self, budget: int | str) -> Plan:
        """Return the plan for a budget, as `recollect.plan` does, or a better one found for an earlier budget.

        Raises:
            BudgetTooSmallError, QuantityError: as `recollect.plan`.
        """
        device_bytes = self.profile.device_memory_bytes
        budget_bytes = parse_budget(budget, reference_bytes=self._plain.peak_bytes, device_bytes=device_bytes)
        if self._plain.peak_bytes <= budget_bytes:
            table = OptionTable(self.profile)
            return self._predicted(table.plan(table.fattest), self._plain, budget_bytes, 0.0)
        bound_s = self._bound_s(budget_bytes)
        enough_s = max(bound_s * (1 + _SMALL_GAP), bound_s + _SMALL_GAP_OF_STEP * self.profile.step_s)
        # Where the bound rules out any plan, there is no need to look for one.
        best = None if math.isinf(bound_s) else self._best(budget_bytes, enough_s)
        if best is not None:
            return self._finished(best, budget_bytes, bound_s)
        full = classic_plan(self.profile, "full")
        if full.predicted_peak_bytes is not None and full.predicted_peak_bytes <= budget_bytes:
            simulation = self._simulate(decide(self.profile, full))
            return self._predicted(full, simulation, budget_bytes, bound_s)
        raise self._too_small(budget_bytes, full)

    def _best(self, budget_bytes: int, enough_s: float) -> Candidate | None:
        """Return the fastest candidate of all solvers; stop at the first that is good enough."""
        best: Candidate | None = None
        for solver in self._solvers:
            found = solver.best(budget_bytes, enough_s)
            if found is not None and (best is None or found.recompute_s < best.recompute_s):
                best = found
            if best is not None and best.recompute_s <= enough_s:
                break
        return best

    def _too_small(self, budget_bytes: int, full: Plan) -> BudgetTooSmallError:
        known = [self._plain, self._simulate(decide(self.profile, full))]
        known += [self._simulated(solver.leanest()) for solver in self._solvers]
        least = min(known, key=lambda simulation: simulation.peak_bytes)
        return BudgetTooSmallError(
            budget_bytes=budget_bytes,
            least_peak_bytes=least.peak_bytes,
            unit=least.peak_call,
            plain_peak_bytes=self._plain.peak_bytes,
            advice=advice(
                self.profile,
                budget_bytes=budget_bytes,
                least_peak_bytes=least.peak_bytes,
                peak_call=least.peak_call,
            ),
        )

    def _bound_s(self, budget_bytes: int) -> float:
        """Return a lower bound on the recompute seconds of any plan."""
        if not self.profile.calls:
            return 0.0
        return self._bound.added_s(budget_bytes)

    def _simulated(self, candidate: Candidate) -> Simulation:
        """Simulate the whole step of a candidate, with the decisions that the engine runs, and check its cost."""
        return checked(self._simulate(candidate.decisions()), candidate.cost)

    def _simulate(self, decisions: Sequence[CallActions]) -> Simulation:
        return simulate(self.profile, decisions, program=self._program)

    def _finished(self, candidate: Candidate, budget_bytes: int, bound_s: float) -> Plan:
        """Return the plan of a candidate, with predictions and bound."""
        chosen = candidate.table.plan(candidate.choice)
        return self._predicted(chosen, self._simulated(candidate), budget_bytes, bound_s)

    def _predicted(self, chosen: Plan, simulation: Simulation, budget_bytes: int, bound_s: float) -> Plan:
        made = simulated_plan(self.profile, replace(chosen, budget_bytes=budget_bytes), simulation)
        if not is_all_on_tape(chosen) or not math.isfinite(bound_s) or self.profile.step_s <= 0:
            return made
        check_bound(bound_s, simulation.recompute_s, budget_bytes)
        return replace(made, bound_slowdown=bound_s / self.profile.step_s)
