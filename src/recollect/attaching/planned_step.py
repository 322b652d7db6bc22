"""A recorded step with its plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recollect.attaching.step_shape import Call
from recollect.errors import BudgetTooSmallError
from recollect.planning.choose import Planner
from recollect.planning.classic import classic_plan
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile
from recollect.quantities import parse_budget

__all__ = ["PlannedStep", "plan_step"]


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
    """

    calls: list[Call]
    profile: Profile
    plan: Plan
    budget_bytes: int
    plain_peak_bytes: int
    full_slowdown: float

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


def plan_step(profile: Profile, calls: list[Call], budget: int | str, earlier: Sequence[PlannedStep]) -> PlannedStep:
    """Return a step with its plan: the leanest that there is, if none fits and it is not the first.

    Raises:
        BudgetTooSmallError: no plan fits, and there is no earlier step.
    """
    planner = Planner(profile)
    budget_bytes = parse_budget(
        budget, reference_bytes=planner.plain_peak_bytes, device_bytes=profile.device_memory_bytes
    )
    try:
        chosen = planner.plan(budget_bytes)
    except BudgetTooSmallError as error:
        if not earlier:
            raise
        chosen = planner.plan(error.least_peak_bytes)
    full = classic_plan(profile, "full").predicted_slowdown or 0.0
    return PlannedStep(calls, profile, chosen, budget_bytes, planner.plain_peak_bytes, full)
