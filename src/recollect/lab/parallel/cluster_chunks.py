"""Choose in how many chunks the last stage of a cluster's step computes LM head and loss."""

from __future__ import annotations

from dataclasses import replace

from recollect.errors import BudgetTooSmallError
from recollect.lab.parallel.cluster_plan import ClusterPlan, plan_cluster
from recollect.lab.parallel.cluster_step import ClusterStep
from recollect.planning.loss_chunks import COUNTS, SAME_PEAK, SAME_TIME

__all__ = ["plan_cluster_with_chunks"]


def plan_cluster_with_chunks(step: ClusterStep, budget: int | str, *, chooses_split: bool = False) -> ClusterPlan:
    """Plan a step with as few chunks of the loss as take no longer than more of them; see `plan_with_chunks`.

    Args:
        step: its own number of chunks does not matter.
        budget: of each device; a percentage is of the fullest rank of the whole loss.
        chooses_split: see `plan_cluster`.

    Raises:
        BudgetTooSmallError: no plan fits with any number; has the lowest peak of all.
        ConfigError, NotYetError, RecordError, QuantityError: as `plan_cluster`.
    """
    best: ClusterPlan | None = None
    failure: BudgetTooSmallError | None = None
    plain_bytes = 0
    for count in COUNTS:
        try:
            found = plan_cluster(replace(step, loss_chunks=count), budget, chooses_split=chooses_split)
        except BudgetTooSmallError as error:
            # Percentages are of the loss as the model computes it.
            budget, plain_bytes = error.budget_bytes, plain_bytes or error.plain_peak_bytes
            if failure is not None and error.least_peak_bytes > (1 - SAME_PEAK) * failure.least_peak_bytes:
                break
            failure = error.with_percentage_of(plain_bytes)
            continue
        budget = found.planned.budget_bytes or budget
        if best is not None and found.step_s >= (1 - SAME_TIME) * best.step_s:
            break
        best = found
        if found.planned.slowdown <= SAME_TIME:
            break
    if best is None:
        assert failure is not None
        raise failure
    return best
