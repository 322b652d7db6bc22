"""The planner: the plan with the least recompute whose simulated peak is within the budget.

1. The chain (`planning/chain.py`) chooses, for all units together, among the options of each unit's menu
   (`planning/menu.py`). Only what was simulated is believed: a plan over the budget is never returned.
2. The bound (`planning/bound.py`) says how much faster any plan could be. Where that is worth it, or nothing fits, plans
   that keep only every Nth layer's output are tried too.
3. If all that finds no plan, or one far from the bound, the greedy search (`planning/greedy.py`) is tried; last of all full
   recompute of the layers alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

from recollect.errors import BudgetTooSmallError
from recollect.plan import Plan
from recollect.planning.advice import advice
from recollect.planning.bound import LowerBound
from recollect.planning.chain import Chain
from recollect.planning.classic import classic_plan
from recollect.planning.decisions import Prediction, Simulate, simulated_plan
from recollect.planning.greedy import STRIDES, Fit, GreedySearch
from recollect.planning.ladder import Ladder, Levels
from recollect.planning.menu import every_choice, unit_menu
from recollect.planning.polish import polish
from recollect.planning.script import Script
from recollect.planning.segments import dropped_outputs, longest_chain, single_outputs
from recollect.planning.simulate import CallDecision, Simulation
from recollect.planning.simulate import simulate as simulate_step
from recollect.planning.windows import windows
from recollect.profile.graph import Profile
from recollect.quantities import parse_budget

__all__ = ["Planner", "plan"]

# A plan this close to the bound is not worth a search for a better one: part of the plan's recompute, and of the step.
_SMALL_GAP = 0.01
_SMALL_GAP_OF_STEP = 0.0005
# A plan this far from it is worth the greedy search too.
_LARGE_GAP_OF_STEP = 0.01
# Events that may be played to measure working sets: about 0.1 s.
_PROBED_EVENTS = 320_000
_FEWEST_PROBES = 12
# Among many units, those at different options make up for options that none of them has.
_OPTIONS_OF_ALL_CALLS = 768
_FEWEST_OPTIONS = 16
# The search around a plan that is far from the bound: simulations at least (or it is not worth it), and events.
_FEWEST_TRIALS = 1000
_POLISHING_EVENTS = 300_000
# Strides beyond these only where nothing fits yet.
_USUAL_STRIDES = 4


def plan(profile: Profile, budget: int | str, *, simulate: Simulate = simulate_step) -> Plan:
    """Choose what to keep so that the peak of the whole step is within a budget, at the least recompute.

    Args:
        profile: the recorded step.
        budget: bytes for the whole step (parameters, gradients, optimizer state, kept values, working memory): an int,
            or text such as "16GiB", "80GB", or "60%" of the peak of the step that keeps everything.
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
        >>> from recollect.profile.graph import OpRecord, StepLog, UnitCall, UnitGraph, ValueRecord
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
        >>> from recollect.models.llama import Llama, LlamaConfig
        >>> model = Llama(LlamaConfig(num_layers=2, hidden_size=32, num_heads=2, vocab_size=64))
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
        self._windows = windows(profile) if self._has_log else []
        self._script = Script(profile, self._windows)
        self._num_events = sum(len(profile.log.blocks[block]) for block, _ in profile.log.sequence) or 1
        self._most_probes = max(_FEWEST_PROBES, _PROBED_EVENTS // self._num_events)
        most_values = max((sum(v.producer is not None for v in g.values) for g in profile.graphs), default=0)
        can_enumerate = 2**most_values <= self._most_probes
        # Hulls and menus are the same for every stride.
        menu = partial(
            unit_menu, most_options=max(_FEWEST_OPTIONS, _OPTIONS_OF_ALL_CALLS // max(1, len(profile.calls)))
        )
        self._options_of = cache(every_choice if can_enumerate else menu)
        self._bound: LowerBound | None = None
        self._chains: dict[int, tuple[Ladder, Chain]] = {}
        self._simulated: dict[tuple[int, Levels], Simulation] = {}
        self._least: Prediction = self._plain

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
        budget_bytes = parse_budget(budget, reference_bytes=self._plain.peak_bytes)
        if self._plain.peak_bytes <= budget_bytes:
            top = Ladder(self.profile)
            return self._finished(Fit(top, top.climb(top.leanest, top.moves), self._plain), budget_bytes, 0.0)
        bound_s = self._bound_s(budget_bytes)
        fit = self._best_of_chains(budget_bytes, bound_s) if self._has_log else None
        if fit is not None and fit.simulation.recompute_s <= bound_s + _LARGE_GAP_OF_STEP * self.profile.step_s:
            return self._finished(fit, budget_bytes, bound_s)
        greedy = GreedySearch(self.profile, budget_bytes, self._simulate, least=self._plain)
        fits = [found for found in (fit, greedy.best()) if found is not None]
        if fits:
            return self._finished(min(fits, key=lambda f: f.simulation.recompute_s), budget_bytes, bound_s)
        full = classic_plan(self.profile, "full", simulate=self._simulate)
        if full.predicted_peak_bytes is not None and full.predicted_peak_bytes <= budget_bytes:
            return replace(full, budget_bytes=budget_bytes)
        least = min(self._least, greedy.least, key=lambda s: s.peak_bytes)
        raise BudgetTooSmallError(
            budget_bytes=budget_bytes,
            least_peak_bytes=least.peak_bytes,
            unit=least.peak_call,
            advice=advice(self.profile, least, budget_bytes),
        )

    def _bound_s(self, budget_bytes: int) -> float:
        """Return the least seconds of recompute of any plan; 0 where nothing is known."""
        if not self._has_log:
            return 0.0
        if self._bound is None:
            self._bound = LowerBound(self.profile)
        return self._bound.recompute_s(budget_bytes)

    def _best_of_chains(self, budget_bytes: int, bound_s: float) -> Fit | None:
        best: Fit | None = None
        enough_s = max(bound_s * (1 + _SMALL_GAP), bound_s + _SMALL_GAP_OF_STEP * self.profile.step_s)
        for tried, stride in enumerate((1, *STRIDES)):
            if stride > max(1, longest_chain(self.profile)) or (best is not None and tried >= _USUAL_STRIDES):
                break
            self._run_chain(stride, budget_bytes, enough_s)
            best = self._best_simulated(budget_bytes)
            if best is not None and best.simulation.recompute_s <= enough_s:
                break
        return best

    def _run_chain(self, stride: int, budget_bytes: int, enough_s: float) -> None:
        """Let the chain of one stride, and the search around its best plan, simulate what they find for a budget."""
        ladder, chain = self._chain(stride)
        for _ in chain.best(budget_bytes):
            pass
        known = [(key[1], s) for key, s in self._simulated.items() if key[0] == stride]
        start = min(known, key=lambda k: (max(0, k[1].peak_bytes - budget_bytes), k[1].recompute_s))
        most_trials = _POLISHING_EVENTS // self._num_events
        is_good = start[1].peak_bytes <= budget_bytes and start[1].recompute_s <= enough_s
        if not is_good and most_trials >= _FEWEST_TRIALS:
            simulate = self._simulate_levels(stride, ladder)
            polish(ladder, chain, start, budget_bytes, simulate, most_trials=most_trials)

    def _chain(self, stride: int) -> tuple[Ladder, Chain]:
        if stride not in self._chains:
            dropped = dropped_outputs(self.profile, stride=stride) if stride > 1 else frozenset()
            ladder = Ladder(
                self.profile,
                dropped_outputs=dropped,
                options_of=self._options_of,
                free_outputs=single_outputs(self.profile),
            )
            simulate = self._simulate_levels(stride, ladder)
            self._chains[stride] = ladder, Chain(ladder, self._windows, simulate, most_probes=self._most_probes)
            # Only what was simulated so far: it is there for every budget, so that a plan for this peak is found again.
            measured = (simulation for key, simulation in self._simulated.items() if key[0] == stride)
            self._least = min([self._least, *measured], key=lambda s: s.peak_bytes)
        return self._chains[stride]

    def _simulate_levels(self, stride: int, ladder: Ladder) -> Callable[[Levels], Simulation]:
        def simulate_levels(levels: Levels) -> Simulation:
            if (stride, levels) not in self._simulated:
                decisions = ladder.decisions(levels)
                self._simulated[stride, levels] = simulate_step(self.profile, decisions, script=self._script)
            return self._simulated[stride, levels]

        return simulate_levels

    def _best_simulated(self, budget_bytes: int) -> Fit | None:
        """Return the fastest plan within the budget that any chain has simulated."""
        within = [
            (s.recompute_s, s.peak_bytes, key) for key, s in self._simulated.items() if s.peak_bytes <= budget_bytes
        ]
        if not within:
            return None
        key = min(within)[2]
        return Fit(self._chains[key[0]][0], key[1], self._simulated[key])

    def _finished(self, fit: Fit, budget_bytes: int, bound_s: float) -> Plan:
        """Return the plan of a fit, with its prediction and its bound."""
        chosen = fit.ladder.plan(fit.levels, budget_bytes=budget_bytes)
        made = simulated_plan(self.profile, chosen, fit.simulation)
        if not self._has_log or not math.isfinite(bound_s) or self.profile.step_s <= 0:
            return made
        return replace(made, bound_slowdown=min(bound_s, fit.simulation.recompute_s) / self.profile.step_s)
