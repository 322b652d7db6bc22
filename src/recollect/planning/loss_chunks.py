"""Choose the number of loss chunks, by recording and planning with different numbers.

One chunk is bit-equal to the model's own loss, so it is preferred if it costs next to nothing. More chunks help only if
the logits are at the peak. Recording takes about as long as a few steps, so the number grows by factors of four, and
the search stops once more chunks neither fit better nor run faster: at most four recordings.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from recollect.errors import BudgetTooSmallError, ChunkedLossError
from recollect.planning.classic import classic_plan
from recollect.planning.planners import Engine
from recollect.planning.planners import plan as plan_for
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile
from recollect.progress import stage
from recollect.quantities import parse_budget

LossChunks = int | Literal["auto"]
COUNTS = (1, 4, 16, 64)

# Fractions of step time: a plan this much slower is as good, and one with this little slowdown is good enough.
SAME_TIME = 0.01
# If more chunks save less than this fraction of the lowest peak, the logits are no longer at the peak.
SAME_PEAK = 0.01


class PlannedStep(Protocol):
    """A planned step, such as a pipeline's."""

    @property
    def step_s(self) -> float:
        """Seconds, recompute included."""

    @property
    def slowdown(self) -> float:
        """Overhead of recompute; 0.03 is 3 %."""

    @property
    def budget_bytes(self) -> int | None:
        """Of each device."""


_Step = TypeVar("_Step", bound=PlannedStep)


@dataclass(frozen=True)
class Planned:
    """A plan, the profile it was made from, and the predicted peak without recompute of the step recorded first."""

    plan: Plan
    profile: Profile
    plain_peak_bytes: int


@stage("planning")
def plan_with_chunks(
    record: Callable[[int], Profile],
    budget: int | str,
    loss_chunks: LossChunks,
    host_budget: int | str = 0,
    engine: Engine = "tape",
) -> Planned:
    """Record and plan with a given number of loss chunks, or the number that gives the least predicted step time.

    A budget like "60%" is relative to the step recorded first. "auto" tries `COUNTS`, beginning with the model's own loss, and
    takes the smallest number of those that are equally fast. A model whose loss cannot be chunked is then planned without
    chunks; if nothing fits, BudgetTooSmallError has ChunkedLossError as its cause. It carries the lowest peak of all numbers.
    """
    counts = COUNTS if loss_chunks == "auto" else (loss_chunks,)
    profile = record(counts[0])
    plain = classic_plan(profile, "keep_all")
    plain_bytes = plain.predicted_peak_bytes or 0
    budget_bytes = parse_budget(budget, reference_bytes=plain_bytes, device_bytes=profile.device_memory_bytes)
    best: Planned | None = None
    failure: BudgetTooSmallError | None = None
    leanest_bytes = 0
    for count in counts:
        if count > counts[0]:
            try:
                profile = record(count)
            except ChunkedLossError as reason:
                if failure is not None and best is None:
                    raise failure from reason
                break
        try:
            made = Planned(plan_for(profile, budget_bytes, host_budget, engine=engine), profile, plain_bytes)
        except BudgetTooSmallError as error:
            if failure is None or error.least_peak_bytes < failure.least_peak_bytes:
                failure = error.changed(plain_peak_bytes=plain_bytes)
        else:
            if best is not None and _step_s(made) >= (1 - SAME_TIME) * _step_s(best):
                break
            best = made
            if (made.plan.predicted_slowdown or 0.0) <= SAME_TIME:
                break
        least = classic_plan(profile, "full").predicted_peak_bytes or 0
        if leanest_bytes and least > (1 - SAME_PEAK) * leanest_bytes:
            break
        leanest_bytes = least
    if best is None:
        assert failure is not None
        raise failure
    return best


def fewest_chunks(plan: Callable[[int, int | str], _Step], budget: int | str) -> _Step:
    """Plan a step of several devices with the smallest number of loss chunks that is as fast as larger numbers.

    If no plan fits with any number, the error has the lowest peak of all.
    """
    best: _Step | None = None
    failure: BudgetTooSmallError | None = None
    plain_bytes = 0
    for count in COUNTS:
        try:
            found = plan(count, budget)
        except BudgetTooSmallError as error:
            # Percentages are of the loss as the model computes it.
            budget, plain_bytes = error.budget_bytes, plain_bytes or error.plain_peak_bytes
            if failure is not None and error.least_peak_bytes > (1 - SAME_PEAK) * failure.least_peak_bytes:
                break
            failure = error.changed(plain_peak_bytes=plain_bytes)
            continue
        budget = found.budget_bytes or budget
        if best is not None and found.step_s >= (1 - SAME_TIME) * best.step_s:
            break
        best = found
        if found.slowdown <= SAME_TIME:
            break
    if best is None:
        assert failure is not None
        raise failure
    return best


def _step_s(planned: Planned) -> float:
    return planned.profile.step_s * (1 + (planned.plan.predicted_slowdown or 0.0))
