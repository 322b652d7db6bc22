"""Make the plan for a budget: search, check and fall back.

1. The solver (`planning/chain_solver.py`) searches for the candidate with the least recompute whose peak is within the budget.
2. The bound (`planning/bound.py`) says how much faster any plan could be, and so when to stop.
3. The simulator has the last word: no plan over its budget is returned.
4. If it finds no plan, try full recompute of the layers; if that does not fit either, the error names the lowest known
   peak, which depends only on bytes: a budget of this size has a plan. It also advises changes, judging by what fills
   memory at that peak.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial

from recollect.arguments import check_kind
from recollect.byte_format import format_bytes
from recollect.errors import BudgetTooSmallError, ProfileFormatError
from recollect.garbage import without_collections
from recollect.planning.bound import LowerBound, check_bound
from recollect.planning.chain import Chain
from recollect.planning.chain_solver import ChainSolver
from recollect.planning.classic import classic_plan
from recollect.planning.compiled_menu import engine_options
from recollect.planning.option_table import Candidate, KnownCosts, OptionTable
from recollect.plans.plan import Plan
from recollect.profile.events import ALLOC, FREE, OPTIMIZER, PHASE
from recollect.profile.profile import Profile, kind_text
from recollect.quantities import parse_budget
from recollect.simulation.clocks import has_two_clocks
from recollect.simulation.decisions import CallActions, decide, plain_call
from recollect.simulation.peak_sums import PeakSums, checked
from recollect.simulation.predicted import simulated_plan
from recollect.simulation.program import Program
from recollect.simulation.simulate import Simulation, simulate
from recollect.simulation.timeline import explain_peak
from recollect.simulation.windows import windows

# The most simulations to measure the options of engines with: enough for all options of a few distinct units.
_MOST_PROBES = 64
# Stop searching this close to the bound: a fraction of the bound itself, and one of the step.
_SMALL_GAP = 0.01
_SMALL_GAP_OF_STEP = 0.001

HOST_ADVICE = 'Or let part of what backward needs go to host memory (host_budget="64GiB", or as much as there is).'
"""For callers that plan without it."""
CACHE_ADVICE = "The output holds a cache for generation (past_key_values): free it by model.config.use_cache = False."

# A chunked loss pays only if the logits are at least this fraction of the bytes that grow with the batch.
_LARGE_PART = 0.1
_ESTIMATED = "bytes and times of compiled units are estimates from their code, which never ran"


class Planner:
    """Plans one profile for any number of budgets, reusing computation from one to the next."""

    @without_collections()
    def __init__(self, profile: Profile, *, make_bound: Callable[[], LowerBound] | None = None) -> None:
        check_kind("plan(profile, budget)", "profile", profile, Profile, "recollect.Profile")
        if profile.calls and not profile.log.events:
            raise ProfileFormatError(
                f"plan for {profile!r}: got no memory events, expected those of a recorded step, from which peaks are "
                "predicted; record it again"
            )
        self.profile = profile
        self._program = Program(profile, windows(profile))
        # Units that were recorded inside the compiler keep PyTorch's choice there; the others keep everything.
        self._plain = self._simulate([plain_call(profile.graph_of(call)) for call in profile.calls])
        self._make_bound = make_bound or partial(LowerBound, profile)
        self._is_compiled = any(graph.variants for graph in profile.graphs)
        self._leanest: tuple[Simulation, list[str]] | None = None

    @cached_property
    def _solvers(self) -> list[ChainSolver]:
        if not self.profile.calls:
            return []
        found = [ChainSolver(self.profile, program=self._program)]
        if any(graph.parts for graph in self.profile.graphs):
            # A search with more to choose from may find a worse plan.
            graphs = tuple(replace(graph, parts=()) for graph in self.profile.graphs)
            found.append(ChainSolver(replace(self.profile, graphs=graphs)))
        return found

    @cached_property
    def _mixes(self) -> Chain | None:
        """Chooses among engines; None if units were recorded only for the tape."""
        if not self._is_compiled:
            return None
        sums = PeakSums(self._program)
        return Chain(KnownCosts(sums, OptionTable(self.profile, options_of=engine_options)), most_probes=_MOST_PROBES)

    @cached_property
    def _bound(self) -> LowerBound:
        return self._make_bound()

    @property
    def plain_peak_bytes(self) -> int:
        return self._plain.peak_bytes

    @without_collections()
    def bound_slowdown(self, budget_bytes: int) -> float | None:
        """Return a lower bound on the slowdown of any plan within a budget; inf if no plan fits, None if unknown."""
        if self.profile.step_s <= 0 or not self.profile.calls or self._is_compiled:
            return None
        return self._bound_s(budget_bytes) / self.profile.step_s

    @without_collections()
    def plan(self, budget: int | str) -> Plan:
        """Return the plan for a budget, as `recollect.plan` does, or a better one found for an earlier budget."""
        device_bytes = self.profile.device_memory_bytes
        budget_bytes = parse_budget(budget, reference_bytes=self._plain.peak_bytes, device_bytes=device_bytes)
        if self._plain.peak_bytes <= budget_bytes and not self._is_compiled:
            table = OptionTable(self.profile)
            return self._predicted(table.plan(table.fattest), self._plain, budget_bytes, 0.0)
        bound_s = self._bound_s(budget_bytes)
        enough_s = max(bound_s * (1 + _SMALL_GAP), bound_s + _SMALL_GAP_OF_STEP * self.profile.step_s)
        # Where the bound rules out any plan, there is no need to look for one.
        best = None if math.isinf(bound_s) else self._best(budget_bytes, enough_s)
        if best is not None:
            return self._predicted(best.table.plan(best.choice), self._simulated(best), budget_bytes, bound_s)
        full = classic_plan(self.profile, "full")
        if full.predicted_peak_bytes is not None and full.predicted_peak_bytes <= budget_bytes:
            simulation = self._simulate(decide(self.profile, full))
            return self._predicted(full, simulation, budget_bytes, bound_s)
        raise self._too_small(budget_bytes, full)

    def plan_or_leanest(self, budget_bytes: int) -> tuple[Plan, BudgetTooSmallError | None]:
        """Return the plan for a budget; if none fits, the leanest one, with the error."""
        try:
            return self.plan(budget_bytes), None
        except BudgetTooSmallError as error:
            # A copy: with a traceback, the caller's frame and those around it would hold it and each other.
            return self.plan(error.least_peak_bytes), error.changed()

    def _best(self, budget_bytes: int, enough_s: float) -> Candidate | None:
        """Return the fastest candidate of all solvers; stop at the first that is good enough."""
        best: Candidate | None = None
        if self._mixes:
            costs = self._mixes.costs
            candidates = (costs.candidate(costs.table.fattest), *self._mixes.best(budget_bytes), *costs.known())
            known = [one for one in candidates if one.peak_bytes <= budget_bytes]
            best = min(known, key=lambda one: (one.recompute_s, one.peak_bytes, one.choice), default=None)
        for solver in self._solvers if best is None else ():
            found = solver.best(budget_bytes, enough_s)
            if found is not None and (best is None or found.recompute_s < best.recompute_s):
                best = found
            if best is not None and best.recompute_s <= enough_s:
                break
        return best

    def _least(self, full: Plan) -> tuple[Simulation, list[str]]:
        """Return the leanest step of all known plans, and the contents of its peak."""
        if self._leanest is None:
            known = [(self._plain, Plan({})), (self._simulate(decide(self.profile, full)), full)]
            for leanest in (solver.leanest for solver in self._solvers):
                known.append((self._simulated(leanest), leanest.table.plan(leanest.choice)))
            least, plan = min(known, key=lambda pair: pair[0].peak_bytes)
            self._leanest = least, explain_peak(self.profile, plan).tenants()
        return self._leanest

    def _too_small(self, budget_bytes: int, full: Plan) -> BudgetTooSmallError:
        least, tenants = self._least(full)
        return BudgetTooSmallError(
            budget_bytes=budget_bytes,
            least_peak_bytes=least.peak_bytes,
            unit=least.peak_call,
            plain_peak_bytes=self._plain.peak_bytes,
            tenants=tenants,
            advice=advice(
                self.profile, budget_bytes=budget_bytes, least_peak_bytes=least.peak_bytes, peak_call=least.peak_call
            ),
        )

    def _bound_s(self, budget_bytes: int) -> float:
        # The bound is one on plans of the tape.
        if not self.profile.calls or self._is_compiled:
            return 0.0
        return self._bound.added_s(budget_bytes)

    def _simulated(self, candidate: Candidate) -> Simulation:
        """Simulate the whole step of a candidate, with the decisions that the engine runs, and check its cost."""
        return checked(self._simulate(candidate.decisions()), candidate.cost)

    def _simulate(self, decisions: Sequence[CallActions]) -> Simulation:
        return simulate(self.profile, decisions, program=self._program)

    def _predicted(self, chosen: Plan, simulation: Simulation, budget_bytes: int, bound_s: float) -> Plan:
        made = simulated_plan(self.profile, replace(chosen, budget_bytes=budget_bytes), simulation)
        if note := _ESTIMATED if made.is_compiled and self.profile.fake else self.profile.times_text:
            made = replace(made, note=note)
        is_in_steps = self.profile.step_s > 0 and not has_two_clocks(self.profile)
        if self._is_compiled or not math.isfinite(bound_s) or not is_in_steps:
            return made
        check_bound(bound_s, simulation.recompute_s, budget_bytes)
        return replace(made, bound_slowdown=bound_s / self.profile.step_s)


def advice(
    profile: Profile, *, budget_bytes: int, least_peak_bytes: int, peak_call: str, is_smallest: bool = False
) -> tuple[str, ...]:
    """Return suggestions that would make the budget feasible, the most promising first."""
    fixed = {kind: nbytes for kind, nbytes in profile.persistent.items() if nbytes}
    made_bytes = lasting_bytes(profile)
    if made_bytes:
        fixed["gradients"] = fixed.get("gradients", 0) + made_bytes
    fixed_bytes = sum(fixed.values())
    if fixed_bytes >= budget_bytes:
        parts = ", ".join(f"{kind_text(kind)} {format_bytes(nbytes)}" for kind, nbytes in fixed.items())
        narrower = " or bf16 parameters" if profile.parameter_itemsize not in (1, 2) else ""
        return (
            f"What lives through the whole step takes {format_bytes(fixed_bytes)} by itself ({parts}), which no recompute "
            f"changes: shard it (FSDP), or use an optimizer with less state{narrower}.",
        )
    if peak_call == "the optimizer step":
        return (
            "The peak is the workspace of the optimizer's step, which no recompute changes: make the optimizer with "
            "foreach=False (one parameter at a time) or fused=True, or use one with less state.",
        )
    found = [CACHE_ADVICE] if profile.makes_cache else []
    logits_bytes = _logits_bytes(profile, peak_call)
    if logits_bytes >= _LARGE_PART * (least_peak_bytes - fixed_bytes):
        found.append(
            f"The peak is in the loss and the head, whose output alone takes {format_bytes(logits_bytes)}: compute the loss "
            'in chunks (recollect.fit(..., loss_chunks="auto")).'
        )
    if not is_smallest:
        # Memory that does not live throughout scales with the batch.
        found += _smaller(profile.batch, (budget_bytes - fixed_bytes) / (least_peak_bytes - fixed_bytes))
    return (*found, HOST_ADVICE)


def _smaller(batch: str, fraction: float) -> list[str]:
    """Return the advice to use this part of a batch, rounded down to be safe, if a batch can be that small."""
    size = re.search(r"(?:^|\[)(\d+)(?:(?:, | x )(\d+))?", batch)
    if size is None:
        fits = f"about {int(100 * fraction)} % of the recorded one ({batch or 'size unknown'}) fits"
        return [f"Use a smaller micro-batch, with gradient accumulation: {fits}."]
    if num_rows := int(fraction * int(size[1])):
        fits = f"about {num_rows} of the {size[1]} samples of the recorded one ({batch}) fit"
        return [f"Use a smaller micro-batch, with gradient accumulation: {fits}."]
    if num_positions := int(fraction * int(size[2] or 0)):
        return [
            f"Use shorter sequences: about {num_positions} of the {size[2]} positions of the recorded ones ({batch}) fit."
        ]
    return []


def lasting_bytes(profile: Profile) -> int:
    """Return an upper bound on the bytes of gradients: those that forward and backward leave for the optimizer."""
    alive: dict[int, int] = {}
    most_bytes = 0
    has_optimizer = False
    for event in profile.log.play({ALLOC: alive.__setitem__, FREE: lambda storage: alive.pop(storage, None)}):
        if event == (PHASE, OPTIMIZER):
            has_optimizer = True
            most_bytes = max(most_bytes, sum(alive.values()))
    return most_bytes if has_optimizer else sum(alive.values())


def _logits_bytes(profile: Profile, peak_call: str) -> int:
    """Return the output bytes of the last unit if the peak is in it or in the loss, else 0."""
    if not profile.calls:
        return 0
    last = profile.calls[-1]
    is_there = peak_call == last.path or peak_call not in {call.path for call in profile.calls}
    if last.repeated or not is_there:
        return 0
    return sum(value.nbytes for value in profile.graph_of(last).values if value.is_output)
