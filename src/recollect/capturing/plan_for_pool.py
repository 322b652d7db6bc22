"""Makes the plan whose CUDA graph fits a budget: the graph's memory pool counts, and not only what is alive at the peak."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from recollect.errors import BudgetTooSmallError
from recollect.planning.choose import HOST_ADVICE
from recollect.planning.classic import classic_plan
from recollect.planning.planners import Engine, planner_for
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile
from recollect.progress import stage
from recollect.quantities import parse_budget
from recollect.simulation.pool import pool_bytes

# How often to look between a budget for the planner whose plan's pool is too large, and one whose is not.
_NUM_HALVINGS: Final = 4


@dataclass(frozen=True)
class PoolPlan:
    """A plan for a captured step.

    Attributes:
        profile: the step, of which what random ops make is kept.
        plan: for it.
        pool_bytes: predicted size of the graph's memory pool.
        resident_bytes: what is in memory beside the pool: parameters, gradients that stay, the optimizer's state, the batch,
            and other allocations.
    """

    profile: Profile
    plan: Plan
    pool_bytes: int
    resident_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.pool_bytes + self.resident_bytes


def sized(profile: Profile, plan: Plan, others: Sequence[PoolPlan] = ()) -> PoolPlan:
    """Predict the pool of the graph of a plan, captured after others in the same pool."""
    before = [(other.profile, other.plan) for other in others]
    return PoolPlan(profile, plan, pool_bytes(*before, (profile, plan)), profile.persistent_bytes)


def plan_for_pool(
    profile: Profile, budget: int | str, *, engine: Engine = "tape", others: Sequence[PoolPlan] = ()
) -> PoolPlan:
    """Return the plan with the least recompute found whose pool, and what is beside it, are within a budget.

    The step begins without gradients, or adds to them. A percentage is of what it needs as a graph without recompute.
    `others`: of graphs that are captured in the same pool before.
    """
    kept = profile.for_capture()
    plain_bytes = sized(kept, classic_plan(kept, "keep_all"), others).total_bytes
    budget_bytes = parse_budget(budget, reference_bytes=plain_bytes, device_bytes=profile.device_memory_bytes)
    planner = planner_for(kept, engine=engine)

    def within(plan: Plan) -> PoolPlan:
        return sized(kept, replace(plan, budget_bytes=budget_bytes), others)

    def planned(given_bytes: int) -> PoolPlan:
        return within(planner.plan(given_bytes))

    with stage("planning"):
        given_bytes = budget_bytes
        try:
            found = planned(given_bytes)
            if found.total_bytes <= budget_bytes:
                return found
            while found.total_bytes > budget_bytes:
                too_large_bytes = given_bytes
                given_bytes = max(1, given_bytes - (found.total_bytes - budget_bytes))
                found = planned(given_bytes)
        except BudgetTooSmallError as error:
            given_bytes = error.least_peak_bytes
            # It leaves fewer gaps in the pool than the leanest plan does.
            full = classic_plan(kept, "full").with_engine("graph" if engine == "graph" else "tape")
            on_tape = planner if engine == "tape" else planner_for(kept, engine="tape")
            leanest = [one.plan(given_bytes) for one in dict.fromkeys((planner, on_tape))]
            found = min(map(within, [*leanest, full]), key=lambda one: one.total_bytes)
            if found.total_bytes > budget_bytes:
                raise error.changed(
                    budget_bytes=budget_bytes,
                    least_peak_bytes=found.total_bytes,
                    plain_peak_bytes=plain_bytes,
                    advice=[sentence for sentence in error.advice if sentence != HOST_ADVICE],
                ) from None
            too_large_bytes = max(given_bytes, budget_bytes)
        for _ in range(_NUM_HALVINGS):
            middle_bytes = (given_bytes + too_large_bytes) // 2
            tried = planned(middle_bytes)
            if tried.total_bytes <= budget_bytes:
                given_bytes = middle_bytes
                found = min(found, tried, key=lambda one: one.plan.predicted_slowdown or 0.0)
            else:
                too_large_bytes = middle_bytes
    return found
