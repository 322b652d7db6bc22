"""The settings of a different tool nearest to a plan: the fastest that fit its budget."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from recollect.byte_format import format_bytes
from recollect.errors import BudgetTooSmallError, PlanError
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile
from recollect.simulation.decisions import decide
from recollect.simulation.simulate import simulate

Settings = TypeVar("Settings")


@dataclass(frozen=True, slots=True)
class Nearest(Generic[Settings]):
    """The best that a different tool can do within a plan's budget, and its cost."""

    settings: Settings
    plan: Plan
    """The plan they stand for, with its predicted peak and slowdown."""
    wanted: Plan
    budget_bytes: int
    """The budget of the plan, or its peak if it has none."""
    lost_s: float
    """Seconds that a step takes longer than under the plan."""
    unused_bytes: int
    """Bytes of the budget unused at the peak."""

    def __str__(self) -> str:
        rows = (("the plan", self.wanted), (self.plan.note, self.plan))
        width = max(len(name) for name, _ in rows)
        lines = [
            f"{name:<{width}}  peak {format_bytes(plan.predicted_peak_bytes or 0)}, {plan.predicted_slowdown or 0:+.1%}"
            for name, plan in rows
        ]
        lost = (
            f"lost: {self.lost_s * 1e3:.3g} ms a step, and {format_bytes(self.unused_bytes)} of the budget are not used"
        )
        return "\n".join([*lines, lost])


def nearest(profile: Profile, wanted: Plan, choices: Iterable[tuple[Settings, Plan]]) -> Nearest[Settings]:
    """Return the fastest of some settings within a plan's budget; of equally fast ones the one with the least peak."""
    if wanted.predicted_peak_bytes is None or wanted.predicted_slowdown is None:
        raise PlanError(
            "nearest settings: got a plan without predicted peak and slowdown, expected one that was made from a profile."
        )
    budget_bytes = wanted.predicted_peak_bytes if wanted.budget_bytes is None else wanted.budget_bytes
    found = list(choices)
    costs = [(plan.predicted_slowdown or 0.0, plan.predicted_peak_bytes or 0) for _, plan in found]
    fitting = [index for index, (_, peak_bytes) in enumerate(costs) if peak_bytes <= budget_bytes]
    if not fitting:
        _, least = min(found, key=lambda choice: choice[1].predicted_peak_bytes or 0)
        raise BudgetTooSmallError(
            budget_bytes=budget_bytes,
            least_peak_bytes=least.predicted_peak_bytes or 0,
            unit=simulate(profile, decide(profile, least)).peak_call,
            advice=(f"That is the peak of {least.note}, the leanest of the other tool's settings.",),
        )
    settings, plan = found[min(fitting, key=costs.__getitem__)]
    lost_s = ((plan.predicted_slowdown or 0.0) - wanted.predicted_slowdown) * profile.step_s
    unused_bytes = budget_bytes - (plan.predicted_peak_bytes or 0)
    return Nearest(settings, plan, wanted, budget_bytes, lost_s, unused_bytes)
