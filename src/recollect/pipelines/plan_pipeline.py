"""`plan_pipeline`: a plan for each stage of a pipeline, under one budget for each device."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from operator import methodcaller
from typing import Any

from recollect.arguments import check_kind
from recollect.errors import BudgetTooSmallError, ScheduleError
from recollect.pipelines.pipeline import Pipeline, PipelinePlan, RecordedPieces, StagePlans
from recollect.pipelines.rank_bound import rank_planner
from recollect.pipelines.schedule import PipelineSchedule, schedule_of
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile
from recollect.progress import stage as progress_stage
from recollect.quantities import parse_budget


def plan_pipeline(
    profiles: Sequence[Profile],
    schedule: Any,
    budget: int | str,
    *,
    split_profiles: Sequence[Profile] = (),
    send_s: float = 0.0,
    return_outputs: bool = True,
) -> PipelinePlan:
    """Choose a plan for each stage such that no rank exceeds the budget at any moment of the schedule.

    A stage holds as many micro-batches as its rank's actions have in flight: under 1F1B the first rank holds as many as there
    are ranks, the last only one, so plans get faster along the pipeline. Ranks do not share memory, and a step
    never takes longer if a rank is faster, so each rank is planned separately.

    Args:
        profiles: one for each stage, in order, of one micro-batch:
            `record(stage, micro_batch, loss_fn=..., gradients="accumulated", holds_output=False)`, where the input of all but
            the first requires grad; of a stage that FSDP2 shards, in `gathered_stage`. Stages that are alike may share one.
        schedule: a `PipelineSchedule`, such as `PipelineSchedule.one_f_one_b(...)`; a schedule object of
            `torch.distributed.pipelining`, or each rank's actions as torch writes them: `[["0F0", "0B0"], ...]`.
        budget: bytes of each device, as an int or text: "22GiB", or "60%" of the fullest rank's peak without recompute.
        split_profiles: of a schedule that splits backward in two (zero bubble, ZBV, DualPipeV): the same stages recorded with
            `split_backward=True`.
        send_s: seconds to send a micro-batch to the next stage.
        return_outputs: as passed to torch's `schedule.step`: whether it returns the outputs of the last stage, which it then
            holds for all micro-batches, and once more when it puts them together. Outputs that the loop then keeps, as
            `out = schedule.step(...)` does, are extra.

    Returns:
        The plans, the peak of each rank, and the time of the step.

    Raises:
        BudgetTooSmallError: the leanest plans of a rank's stages need more.
        ScheduleError: the schedule cannot run, has a different number of stages than there are profiles, or splits backwards
            and there are no `split_profiles`.
        ProfileFormatError: a profile without gradients that accumulate; a stage with different ops where backward is split.
        ArgumentError, QuantityError: an argument of the wrong type; a budget that is not an amount.

    Example:
        >>> import torch, recollect
        >>> from torch import nn
        >>> stage = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)))
        >>> micro_batch = torch.randn(16, 32, requires_grad=True)
        >>> profile = recollect.record(
        ...     stage, micro_batch, loss_fn=torch.sum, gradients="accumulated", holds_output=False, fake=True
        ... )
        >>> planned = plan_pipeline(
        ...     [profile] * 2, recollect.PipelineSchedule.one_f_one_b(num_stages=2, num_micro_batches=4), "80%"
        ... )
        >>> planned.in_flight, planned.peak_bytes <= planned.budget_bytes
        ((2, 1), True)
    """
    pipeline = _checked(profiles, schedule, split_profiles, return_outputs, "plan_pipeline(profiles, schedule, budget)")
    with progress_stage("planning the pipeline"):
        planners = [*map(cache(rank_planner), pipeline.ranks)]
        plain_peak_bytes = max(planner.plain_peak_bytes for planner in planners)
        device_bytes = min(profile.device_memory_bytes for profile in profiles)
        budget_bytes = parse_budget(budget, reference_bytes=plain_peak_bytes, device_bytes=device_bytes)
        plan_of = cache(methodcaller("plan", budget_bytes))
        plans: list[Plan] = []
        for rank, planner in enumerate(planners):
            try:
                plans.append(plan_of(planner))
            except BudgetTooSmallError as error:
                raise _too_small(error, pipeline.schedule, rank, plain_peak_bytes) from None
        peaks_bytes = [plan.predicted_peak_bytes or 0 for plan in plans]
        of_stages = pipeline.plans_of_pieces(plans)
        return pipeline.predicted(of_stages, peaks_bytes, send_s=send_s, budget_bytes=budget_bytes)


def predict_pipeline(
    profiles: Sequence[Profile],
    schedule: Any,
    plans: Sequence[StagePlans],
    *,
    split_profiles: Sequence[Profile] = (),
    send_s: float = 0.0,
    return_outputs: bool = True,
) -> PipelinePlan:
    """Predict the memory and time of a pipeline under given plans, such as the same setting for all stages.

    Args:
        profiles: see `plan_pipeline`.
        schedule: see `plan_pipeline`.
        plans: one for each stage, or, for a stage whose micro-batches run under different plans, one for each micro-batch.
        split_profiles: see `plan_pipeline`.
        send_s: see `plan_pipeline`.
        return_outputs: see `plan_pipeline`.

    Returns:
        The plans with their own slowdowns, the peak of each rank, and the time of the step.

    Raises:
        ScheduleError: the schedule cannot run, or has a different number of stages or micro-batches than there are profiles or
            plans.
        ProfileFormatError, ArgumentError: as `plan_pipeline`.

    Example:
        >>> import torch, recollect
        >>> from torch import nn
        >>> stage = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)))
        >>> micro_batch = torch.randn(16, 32, requires_grad=True)
        >>> profile = recollect.record(
        ...     stage, micro_batch, loss_fn=torch.sum, gradients="accumulated", holds_output=False, fake=True
        ... )
        >>> schedule = recollect.PipelineSchedule.gpipe(num_stages=2, num_micro_batches=4)
        >>> full = predict_pipeline([profile] * 2, schedule, [recollect.classic_plan(profile, "full")] * 2)
        >>> full.in_flight, full.slowdown > 0
        ((4, 4), True)
    """
    pipeline = _checked(
        profiles, schedule, split_profiles, return_outputs, "predict_pipeline(profiles, schedule, plans)"
    )
    num_micro_batches = pipeline.schedule.num_micro_batches
    if len(plans) != len(profiles):
        raise ScheduleError(f"got {len(plans)} plans for {len(profiles)} stages, expected one for each")
    for stage, own in enumerate(plans):
        if not isinstance(own, Plan) and len(own) != num_micro_batches:
            raise ScheduleError(
                f"stage {stage}: got {len(own)} plans for {num_micro_batches} micro-batches, expected one for each, or one "
                "for all"
            )
    return pipeline.predicted(plans, pipeline.peaks_bytes(plans), send_s=send_s)


def _checked(
    profiles: Sequence[Profile], schedule: Any, split_profiles: Sequence[Profile], return_outputs: bool, call: str
) -> Pipeline:
    found = schedule_of(schedule)
    found = replace(found, return_outputs=return_outputs and found.return_outputs)
    for name, given in (("profiles", profiles), ("split_profiles", split_profiles)):
        for profile in given:
            check_kind(call, name, profile, Profile, "recollect.Profile")
        if len(given) != found.num_stages and (given or name == "profiles"):
            raise ScheduleError(
                f"got {len(given)} {name} for a schedule of {found.num_stages} stages, expected one for each"
            )
    return Pipeline(found, RecordedPieces(profiles, split_profiles))


def _too_small(error: BudgetTooSmallError, schedule: PipelineSchedule, rank: int, plain: int) -> BudgetTooSmallError:
    stages = schedule.stages_of(rank)
    number, _, path = error.unit.partition(".")
    where = f"{path or 'the whole'} of stage {stages[int(number)]}" if number.isdigit() else error.unit
    advice = ["Use more ranks, smaller micro-batches, or a schedule with fewer of them in flight."]
    if schedule.return_outputs and stages[-1] == schedule.num_stages - 1:
        advice += ["If nothing reads what the schedule returns, pass return_outputs=False to its step, and here."]
    return BudgetTooSmallError(
        budget_bytes=error.budget_bytes,
        least_peak_bytes=error.least_peak_bytes,
        unit=f"rank {rank} (stages {', '.join(map(str, stages))}; {where})",
        advice=advice,
        plain_peak_bytes=plain,
    )
