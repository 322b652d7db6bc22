"""A recorded step with its plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from recollect.attaching.ranks import ALONE, Ranks
from recollect.attaching.step_shape import Call
from recollect.errors import BudgetTooSmallError
from recollect.planning.choose import Planner
from recollect.planning.classic import classic_plan
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile
from recollect.quantities import parse_budget
from recollect.simulation.decisions import decide, simulated_plan
from recollect.simulation.simulate import simulate

__all__ = ["PlannedStep", "common_steps", "plan_step"]

# Of how many processes the plans are tried by all the others, those that need the most memory.
_MOST_TRIED: Final = 4


@dataclass
class PlannedStep:
    """A recorded step with its plan.

    Attributes:
        calls: of the model, in order.
        profile: the recorded step.
        plan: made for it.
        budget_bytes: in which it should fit.
        plain_peak_bytes: predicted peak without recompute.
        full_slowdown: predicted slowdown of full recompute.
        number: how many were recorded before it; the same in all processes.
        worst_slowdown: predicted slowdown under the plan in the process where it is largest.
    """

    calls: list[Call]
    profile: Profile
    plan: Plan
    budget_bytes: int
    plain_peak_bytes: int
    full_slowdown: float
    number: int
    worst_slowdown: float

    @property
    def peak_bytes(self) -> int:
        """Predicted peak under the plan."""
        return self.plan.predicted_peak_bytes or 0

    @property
    def fits(self) -> bool:
        """Whether the plan keeps the step within the budget."""
        return self.peak_bytes <= self.budget_bytes

    def follows(self, calls: Sequence[Call]) -> bool:
        """Whether the step begins with calls like these, each at least as large."""
        return len(calls) <= len(self.calls) and all(
            known.is_at_least(call) for known, call in zip(self.calls, calls, strict=False)
        )

    def replaces(self, other: PlannedStep) -> bool:
        """Whether this step has just the calls of the other, recorded later."""
        return self.calls == other.calls


def plan_step(
    profile: Profile,
    calls: list[Call],
    budget: int | str,
    earlier: Sequence[PlannedStep],
    *,
    number: int,
    ranks: Ranks = ALONE,
) -> PlannedStep:
    """Return a step with its plan: the leanest that there is, if none fits and it is not the first.

    Args:
        profile: the step, as this process recorded it.
        calls: of the model in it.
        budget: bytes, or a text; percentages are of the process that needs the most.
        earlier: what was planned before.
        number: of recordings before it.
        ranks: the processes that have recorded it, too, and get the same plan.

    Raises:
        BudgetTooSmallError: no plan fits, in some process, and there is no earlier step.
    """
    planner = Planner(profile)
    plain_bytes = max(ranks.gather(planner.plain_peak_bytes))
    budget_bytes = parse_budget(budget, reference_bytes=plain_bytes, device_bytes=profile.device_memory_bytes)
    budget_bytes = max(ranks.gather(budget_bytes))
    chosen, problem = _own_plan(planner, budget_bytes)
    problems = [found for found in ranks.gather(problem) if found is not None]
    if problems and not earlier:
        raise max(problems, key=lambda error: error.least_peak_bytes)
    worst_slowdown = chosen.predicted_slowdown or 0.0
    if not ranks.is_alone:
        chosen, worst_slowdown = _common_plan(profile, chosen, planner.plain_peak_bytes, budget_bytes, ranks)
    full = classic_plan(profile, "full").predicted_slowdown or 0.0
    return PlannedStep(calls, profile, chosen, budget_bytes, planner.plain_peak_bytes, full, number, worst_slowdown)


def common_steps(covering: Sequence[PlannedStep], num_recorded: int, ranks: Ranks) -> list[PlannedStep]:
    """Return the steps that cover the calls so far in all processes, those with the least recompute first.

    Args:
        covering: those that cover the calls of this process.
        num_recorded: recordings so far.
        ranks: the processes, which all ask at the same call.
    """
    own = {step.number: step for step in covering}
    is_common = ranks.least([number in own for number in range(num_recorded)])
    common = [own[number] for number in range(num_recorded) if is_common[number]]
    return sorted(common, key=lambda step: (step.worst_slowdown, step.number))


def _own_plan(planner: Planner, budget_bytes: int) -> tuple[Plan, BudgetTooSmallError | None]:
    """Return the plan for a budget; where none fits, the leanest, and the error that says so."""
    try:
        return planner.plan(budget_bytes), None
    except BudgetTooSmallError as error:
        return planner.plan(error.least_peak_bytes), error


def _common_plan(profile: Profile, own: Plan, plain_bytes: int, budget_bytes: int, ranks: Ranks) -> tuple[Plan, float]:
    """Return the plan that all processes run, with the predictions for this one; and the slowdown in the slowest.

    Of the plans that keep all of them within the budget, the one under which the slowest is fastest; if none does, the one that
    exceeds it least.
    """
    offered = ranks.gather((plain_bytes, own))
    hungriest = sorted(range(len(offered)), key=lambda rank: (-offered[rank][0], rank))[:_MOST_TRIED]
    tried = [offered[rank][1] for rank in hungriest]
    mine = [simulated_plan(profile, plan, simulate(profile, decide(profile, plan))) for plan in tried]
    results = ranks.gather([(plan.predicted_peak_bytes or 0, plan.predicted_slowdown or 0.0) for plan in mine])

    def cost(index: int) -> tuple[int, float, int]:
        peaks_bytes, slowdowns = zip(*(result[index] for result in results), strict=True)
        return max(0, *(peak - budget_bytes for peak in peaks_bytes)), max(slowdowns), index

    best = min(range(len(tried)), key=cost)
    return replace(mine[best], bound_slowdown=own.bound_slowdown), cost(best)[1]
