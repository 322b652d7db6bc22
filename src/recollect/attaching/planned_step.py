"""A recorded step with its plan, and what `attach` says of it in words."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from recollect.attaching.course import Course, largest
from recollect.attaching.step_shape import Call, covering
from recollect.byte_format import format_bytes
from recollect.errors import BudgetTooSmallError
from recollect.planning.choose import Planner
from recollect.planning.planners import OffloadPlanner
from recollect.plans.action import EngineChoice
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import needs_all_ranks
from recollect.profile.profile import Profile

# Of two recordings of the same step, the later one may be this part of the other.
_NEARLY: Final = 0.99


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
        courses: what ran in each call.
        spare: for each call, further runs of units for which memory is reserved; they run at their leanest.
        more_bytes: reserved for what other steps held for reasons that nothing tells.
        state_bytes: that the optimizers had when it was planned.
        num_calls: of the model that ran under the plan.
        held: the last readings of the allocator for each call under the plan; this and what follows is for `CallWatch`.
        held_before: the least that was in memory before a step under the plan; 0 if that is not known.
        most_held_bytes: that its only call should hold when it returns; None if it has several.
    """

    calls: list[Call]
    profile: Profile
    plan: Plan
    budget_bytes: int
    plain_peak_bytes: int
    full_slowdown: float
    number: int
    worst_slowdown: float
    courses: list[Course] = field(default_factory=list)
    spare: list[Mapping[str, int]] = field(default_factory=list)
    more_bytes: int = 0
    state_bytes: int = 0
    num_calls: int = 0
    held: dict[tuple[int, Call], deque[int]] = field(default_factory=dict)
    held_before: int = 0
    most_held_bytes: int | None = None

    @property
    def work_bytes(self) -> int:
        """Peak without recompute beyond what is alive throughout."""
        return self.plain_peak_bytes - self.profile.persistent_bytes

    @property
    def peak_bytes(self) -> int:
        """Predicted peak under the plan."""
        return self.plan.predicted_peak_bytes or 0

    @property
    def needs_all_ranks(self) -> bool:
        """Whether other processes could wait for ever for one that runs another plan."""
        # A module that runs again as a whole runs what it has of collectives, which its plan does not name.
        runs_modules = any(unit.engine is EngineChoice.REGION for unit in self.plan.units.values())
        return runs_modules or needs_all_ranks(self.plan.units)

    @property
    def fits(self) -> bool:
        """Whether the plan keeps the step within the budget."""
        return self.peak_bytes <= self.budget_bytes

    def follows(self, calls: Sequence[Call]) -> bool:
        """Whether the step begins with calls like these, each at least as large."""
        return len(calls) <= len(self.calls) and all(
            known.is_at_least(call) for known, call in zip(self.calls, calls, strict=False)
        )

    def foreseen(self, calls: Sequence[Call], group: Sequence[Call]) -> tuple[Course, Mapping[str, int]] | None:
        """Return for which course of the last call the plan holds, and which further runs of units it has memory for.

        None if it does not cover the calls.

        Args:
            calls: so far, of which this is a step.
            group: of them, those since nothing waited for backward.
        """
        found = [len(calls) - 1] if self.follows(calls) else covering(self.calls, group)
        if not found:
            return None
        if len(found) == 1:
            return self.courses[found[0]], self.spare[found[0]]
        # Of several, each unit as often as in any.
        most: dict[str, int] = {}
        for index in found:
            for path, number in self.spare[index].items():
                most[path] = max(most.get(path, 0), number)
        return largest(self.courses[index] for index in found), most

    def replaces(self, other: PlannedStep) -> bool:
        """Whether this step has just the calls of the other, recorded later, and nothing less happened in them."""
        is_alike = self.calls == other.calls and all(map(Course.is_at_least, self.courses, other.courses))
        return is_alike and self.work_bytes >= _NEARLY * other.work_bytes

    def hides(self, other: PlannedStep) -> bool:
        """Whether the other begins with the same calls and is smaller, so that only its end may tell which it is."""
        num_common = min(len(self.calls), len(other.calls))
        is_alike = self.calls[:num_common] == other.calls[:num_common] and len(self.calls) >= len(other.calls)
        return is_alike and (self.work_bytes, self.number) > (other.work_bytes, other.number)


def own_plan(planner: Planner | OffloadPlanner, budget_bytes: int) -> tuple[Plan, BudgetTooSmallError | None]:
    """Return the plan for a budget; where none fits, the leanest, and the error that says so."""
    try:
        return planner.plan(budget_bytes), None
    except BudgetTooSmallError as error:
        return planner.plan(error.least_peak_bytes), error


_NOT_COUNTED = (
    "not counted: evaluation and generation; what other threads, processes and libraries allocate without PyTorch; "
    "on the CPU also shared memory and mapped files"
)


def line_of(planned: PlannedStep, seconds: float) -> str:
    """Return the line that says what was planned.

    Args:
        planned: the step.
        seconds: that planning took.
    """
    slowdown, host_bytes = planned.plan.predicted_slowdown or 0.0, planned.plan.predicted_host_bytes
    host = f"host memory {format_bytes(host_bytes)}, " if host_bytes else ""
    return (
        f"recollect: {format_bytes(planned.budget_bytes)} budget, peak {format_bytes(planned.peak_bytes)}, {host}"
        f"{slowdown:+.1%} (full recompute: {planned.full_slowdown:+.0%}), planned for {planned.calls[0]} in {seconds:.1f} s"
    )


def numbers_of(planned: PlannedStep) -> dict[str, float]:
    """Return the numbers of that line, under names for the loggers of trainers."""
    return {
        "memory_budget_bytes": planned.budget_bytes,
        "predicted_peak_bytes": planned.peak_bytes,
        "predicted_slowdown": planned.plan.predicted_slowdown or 0.0,
    }


def report_of(
    planned: Sequence[PlannedStep], budget_bytes: int | None, num_steps: int, recorded_steps: Sequence[int]
) -> str:
    """Return a report of some lines."""
    if budget_bytes is None:
        return "recollect: no step was recorded yet; the first one ends with the optimizer's step"
    lines = [f"{format_bytes(budget_bytes)} budget, {num_steps} steps, {len(recorded_steps)} of them recorded"]
    for step in planned:
        counts = Counter(map(str, step.calls))
        calls = " and ".join(f"{number} calls of {call}" if number > 1 else call for call, number in counts.items())
        # Steps of the same calls may differ in what is alive, or in what runs in the units: the number tells them apart.
        lines.append(
            f"{calls}, as in step {recorded_steps[step.number]}: predicted peak {format_bytes(step.peak_bytes)} "
            f"({format_bytes(step.plain_peak_bytes)} without recompute), {step.plan.predicted_slowdown or 0.0:+.1%}"
        )
    last = planned[-1].profile
    counted = ", ".join(f"{kind.replace('_', ' ')} {format_bytes(n)}" for kind, n in last.persistent.items() if n)
    return "\n".join([*lines, f"counted throughout: {counted}", _NOT_COUNTED])
