"""The planner: the plan with the least recompute whose simulated peak is within the budget.

1. The chain (`planning/chain.py`) chooses, for all units together, among the options of each unit's menu
   (`planning/menu.py`). Only what was simulated is believed: a plan over the budget is never returned.
2. The bound (`planning/bound.py`) says how much faster any plan could be. Where that is worth it, or nothing fits, plans
   that drop outputs of layers are tried too (`planning/search.py`).
3. If all that finds no plan, the greedy search (`planning/greedy.py`) is tried; last of all full recompute of the layers
   alone, and a search for the least peak, which the error names if that is too much, too.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from recollect.errors import BudgetTooSmallError
from recollect.planning.advice import advice
from recollect.planning.bound import LowerBound, check_bound
from recollect.planning.classic import classic_plan
from recollect.planning.greedy import Fit, GreedySearch, Trial
from recollect.planning.ladder import Ladder
from recollect.planning.search import ChainSearch
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile
from recollect.quantities import parse_budget
from recollect.simulation.decisions import Simulate, decide, simulated_plan
from recollect.simulation.simulate import CallDecision
from recollect.simulation.simulate import simulate as simulate_step

__all__ = ["Planner", "plan"]

# A plan this close to the bound is not worth a search for a better one: part of the plan's recompute, and of the step.
_SMALL_GAP = 0.01
_SMALL_GAP_OF_STEP = 0.001


def plan(profile: Profile, budget: int | str, *, simulate: Simulate = simulate_step) -> Plan:
    """Choose what to keep so that the peak of the whole step is within a budget, at the least recompute.

    Args:
        profile: the recorded step.
        budget: bytes for the whole step (parameters, gradients, optimizer state, kept values, working memory): an int,
            or text such as "16GiB", "80GB", "60%" of the peak of the step that keeps everything, or "90% of the device".
        simulate: predicts the peak and the recompute time of a choice.

    Returns:
        A plan with `predicted_peak_bytes <= budget_bytes`, the same for every run.

    Raises:
        BudgetTooSmallError: no plan that is tried fits; carries the least peak, the unit that needs it, and what
            would help.
        QuantityError: the budget is no number of bytes.

    Complexity: about as many simulations as the distinct units have options. To plan for many budgets, use `Planner`.

    Example:
        >>> from types import SimpleNamespace
        >>> from recollect.profile.events import StepLog
        >>> from recollect.profile.graph import OpRecord, UnitCall, UnitGraph, ValueRecord
        >>> values = (ValueRecord("x", 8, producer=None), ValueRecord("mul", 64, producer=0, saved=True))
        >>> layer = UnitGraph(values, (OpRecord("mul", (0,), (1,), 0.5),))
        >>> profile = Profile((layer,), (UnitCall("layers.0", 0, repeated=True),), StepLog(), step_s=2.0)
        >>> def simulate(profile, decisions):
        ...     num_dropped = len(decisions[0].recompute)
        ...     return SimpleNamespace(peak_bytes=96 - 64 * num_dropped, recompute_s=0.5 * num_dropped)
        >>> print(plan(profile, "40 B", simulate=simulate))
        layers.0    recompute all
        all others  keep all
        predicted peak 32 B, budget 40 B; predicted slowdown 25.0 %
    """
    return Planner(profile, simulate=simulate).plan(budget)


class Planner:
    """Plans one profile for any number of budgets; what was computed and simulated for one helps the next.

    Args:
        profile: the recorded step.
        simulate: predicts the peak and the recompute time of a choice.

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

    def __init__(self, profile: Profile, *, simulate: Simulate = simulate_step) -> None:
        self.profile = profile
        self._simulate = simulate
        keep_all = [CallDecision(recompute=frozenset(), keep_output=True)] * len(profile.calls)
        self._plain = simulate(profile, keep_all)
        # Another simulator knows nothing of the log's windows, nor the bound of it.
        self._has_log = simulate is simulate_step and bool(profile.log.sequence)
        self._search: ChainSearch | None = None
        self._bound: LowerBound | None = None

    @property
    def plain_peak_bytes(self) -> int:
        """Predicted peak of the step that keeps everything."""
        return self._plain.peak_bytes

    def bound_slowdown(self, budget_bytes: int) -> float | None:
        """Return the least slowdown of any plan within a budget; inf if there is none, None where no bound is known."""
        if not self._has_log or self.profile.step_s <= 0:
            return None
        return self._bound_s(budget_bytes) / self.profile.step_s

    def plan(self, budget: int | str) -> Plan:
        """Return the plan for a budget; the same as `plan`, or a better one that an earlier budget happened to find.

        Raises:
            BudgetTooSmallError, QuantityError: as `plan`.
        """
        device_bytes = self.profile.device_memory_bytes
        budget_bytes = parse_budget(budget, reference_bytes=self._plain.peak_bytes, device_bytes=device_bytes)
        if self._plain.peak_bytes <= budget_bytes:
            top = Ladder(self.profile)
            return self._finished(Fit(top, top.climb(top.leanest, top.moves), self._plain), budget_bytes, 0.0)
        bound_s = self._bound_s(budget_bytes)
        fit = self._best_of_chains(budget_bytes, bound_s) if self._has_log else None
        if fit is not None:
            return self._finished(fit, budget_bytes, bound_s)
        play = partial(self._simulate, self.profile) if self._search is None else self._search.peak_sums.peaks
        greedy = GreedySearch(self.profile, budget_bytes, play)
        found = greedy.best()
        if found is not None:
            return self._finished(self._simulated(found), budget_bytes, bound_s)
        full = classic_plan(self.profile, "full", simulate=self._simulate)
        if full.predicted_peak_bytes is not None and full.predicted_peak_bytes <= budget_bytes:
            return replace(full, budget_bytes=budget_bytes)
        leanest = None if self._search is None else self._search.leanest()
        if leanest is not None and leanest.simulation.peak_bytes <= budget_bytes:
            return self._finished(leanest, budget_bytes, bound_s)
        known = [self._plain, *([self._simulated(greedy.leanest).simulation] if greedy.leanest else [])]
        known.append(self._simulate(self.profile, decide(self.profile, full)))
        least = min(known if leanest is None else [*known, leanest.simulation], key=lambda s: s.peak_bytes)
        raise BudgetTooSmallError(
            budget_bytes=budget_bytes,
            least_peak_bytes=least.peak_bytes,
            unit=least.peak_call,
            advice=advice(self.profile, least, budget_bytes),
        )

    def _simulated(self, trial: Trial) -> Fit:
        """Let the simulator have the last word."""
        simulation = self._simulate(self.profile, trial.ladder.decisions(trial.levels))
        return Fit(trial.ladder, trial.levels, simulation)

    def _bound_s(self, budget_bytes: int) -> float:
        """Return the least seconds of recompute of any plan; 0 where nothing is known."""
        if not self._has_log:
            return 0.0
        if self._bound is None:
            self._bound = LowerBound(self.profile)
        return self._bound.recompute_s(budget_bytes)

    def _best_of_chains(self, budget_bytes: int, bound_s: float) -> Fit | None:
        if self._search is None:
            self._search = ChainSearch(self.profile)
        enough_s = max(bound_s * (1 + _SMALL_GAP), bound_s + _SMALL_GAP_OF_STEP * self.profile.step_s)
        return self._search.best(budget_bytes, enough_s)

    def _finished(self, fit: Fit, budget_bytes: int, bound_s: float) -> Plan:
        """Return the plan of a fit, with its prediction and its bound."""
        chosen = fit.ladder.plan(fit.levels, budget_bytes=budget_bytes)
        made = simulated_plan(self.profile, chosen, fit.simulation)
        if not self._has_log or not math.isfinite(bound_s) or self.profile.step_s <= 0:
            return made
        check_bound(bound_s, fit.simulation.recompute_s, budget_bytes)
        return replace(made, bound_slowdown=bound_s / self.profile.step_s)
