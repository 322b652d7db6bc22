"""Choose in how many chunks the last stage of a cluster's step computes LM head and loss."""

from __future__ import annotations

from dataclasses import replace

from recollect.lab.parallel.cluster_plan import ClusterPlan, plan_cluster
from recollect.lab.parallel.cluster_step import ClusterStep
from recollect.planning.loss_chunks import fewest_chunks

__all__ = ["plan_cluster_with_chunks"]


def plan_cluster_with_chunks(step: ClusterStep, budget: int | str, *, chooses_split: bool = False) -> ClusterPlan:
    """Plan a step with as few chunks of the loss as take no longer than more of them; see `fewest_chunks`.

    Args:
        step: its own number of chunks does not matter.
        budget: of each device; a percentage is of the fullest rank of the whole loss.
        chooses_split: see `plan_cluster`.

    Raises:
        BudgetTooSmallError: no plan fits with any number; has the lowest peak of all.
        ConfigError, NotYetError, RecordError, QuantityError: as `plan_cluster`.
    """
    return fewest_chunks(
        lambda count, amount: plan_cluster(replace(step, loss_chunks=count), amount, chooses_split=chooses_split),
        budget,
    )
