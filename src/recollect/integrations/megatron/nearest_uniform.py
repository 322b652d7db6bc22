"""Write the plans of a pipeline as the Megatron settings that come nearest to them: the same for all stages."""

from __future__ import annotations

from collections.abc import Sequence

from recollect.errors import BudgetTooSmallError
from recollect.integrations.megatron.config import RecomputeConfig
from recollect.integrations.megatron.nearest import choices
from recollect.pipelines.pipeline import PipelinePlan
from recollect.pipelines.plan_pipeline import predict_pipeline
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile

__all__ = ["nearest_uniform_settings"]


def nearest_uniform_settings(
    profiles: Sequence[Profile],
    planned: PipelinePlan,
    *,
    split_profiles: Sequence[Profile] = (),
    send_s: float = 0.0,
) -> tuple[RecomputeConfig, PipelinePlan]:
    """Return the fastest of Megatron's settings with which each rank keeps the budget of some plans.

    Args:
        profiles: of all stages, that the plans were made from; those that are alike are the same object.
        planned: the plans.
        split_profiles: see `plan_pipeline`.
        send_s: see `plan_pipeline`.

    Returns:
        The settings, and what the pipeline needs under them.

    Raises:
        BudgetTooSmallError: no setting fits.

    Complexity: for each setting a simulation of each distinct stage; of the pipeline, until one fits, from the fastest on.
    """
    budget_bytes = planned.peak_bytes if planned.budget_bytes is None else planned.budget_bytes
    distinct = {id(profile): profile for profile in profiles}
    plans = {key: dict(choices(profile)) for key, profile in distinct.items()}
    everywhere = [config for config in next(iter(plans.values())) if all(config in made for made in plans.values())]

    def added_s(config: RecomputeConfig) -> float:
        return sum((plans[id(p)][config].predicted_slowdown or 0.0) * p.step_s for p in profiles)

    least = 0
    for config in sorted(everywhere, key=added_s):
        chosen: list[Plan] = [plans[id(profile)][config] for profile in profiles]
        found = predict_pipeline(profiles, planned.schedule, chosen, split_profiles=split_profiles, send_s=send_s)
        if found.peak_bytes <= budget_bytes:
            return config, found
        least = found.peak_bytes if not least else min(least, found.peak_bytes)
    raise BudgetTooSmallError(
        budget_bytes=budget_bytes,
        least_peak_bytes=least,
        unit="the fullest rank",
        advice=("That is the leanest of Megatron's settings, the same for all stages.",),
    )
