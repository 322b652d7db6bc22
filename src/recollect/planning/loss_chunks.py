"""In how many chunks should the loss be computed? The plan for a budget, over recordings with different counts.

One chunk is the model's own loss, to the bit, so it stays wherever it costs next to nothing. More chunks can only help where
the logits are at the peak. Recording a step takes about as long as a few steps, so counts grow by a factor of four, and the
search ends as soon as more chunks neither fit better nor run faster: at most four recordings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from recollect.errors import BudgetTooSmallError, ChunkedLossError
from recollect.planning.choose import plan as plan_for
from recollect.planning.classic import classic_plan
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile
from recollect.quantities import parse_budget

__all__ = ["COUNTS", "LossChunks", "Planned", "plan_with_chunks"]

LossChunks = int | Literal["auto"]
COUNTS = (1, 4, 16, 64)

# Of the step without recompute: a plan this much slower is as good, and one this near to no recompute cannot be beaten.
_SAME_TIME = 0.01
# Of the leanest plan's peak: where more chunks free less than this, logits are no longer at the peak.
_SAME_PEAK = 0.01


@dataclass(frozen=True)
class Planned:
    """A plan, the profile that it was made from, and the predicted peak of the model's own step without recompute."""

    plan: Plan
    profile: Profile
    plain_peak_bytes: int


def plan_with_chunks(record: Callable[[int], Profile], budget: int | str, loss_chunks: LossChunks) -> Planned:
    """Record and plan, with a given number of loss chunks or the one whose plan has the least predicted step time.

    Args:
        record: records the step with so many chunks.
        budget: bytes, or text; a part such as "60%" is one of the step that is recorded first: with "auto" the model's own.
        loss_chunks: a number, or "auto" to try 1, 4, 16 and 64, and take the fewest of those that are equally fast.

    Returns:
        The plan and what it was made from.

    Raises:
        BudgetTooSmallError: no plan fits with any of the numbers; has the least peak of them all.
        ChunkedLossError, RecordError, QuantityError: as `record` and `plan`. With "auto", a model whose loss cannot be
            computed in chunks is planned without them; if nothing fits then, the first error is the cause of the second.
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
            made = Planned(plan_for(profile, budget_bytes), profile, plain_bytes)
        except BudgetTooSmallError as error:
            if failure is None or error.least_peak_bytes < failure.least_peak_bytes:
                failure = error
        else:
            if best is not None and _step_s(made) >= (1 - _SAME_TIME) * _step_s(best):
                break
            best = made
            if (made.plan.predicted_slowdown or 0.0) <= _SAME_TIME:
                break
        least = classic_plan(profile, "full").predicted_peak_bytes or 0
        if leanest_bytes and least > (1 - _SAME_PEAK) * leanest_bytes:
            break
        leanest_bytes = least
    if best is None:
        assert failure is not None
        raise failure
    return best


def _step_s(planned: Planned) -> float:
    return planned.profile.step_s * (1 + (planned.plan.predicted_slowdown or 0.0))
