"""`plan_pipeline`: a plan for each stage of a pipeline, under one budget for each device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from recollect.arguments import check_kind
from recollect.byte_format import format_bytes
from recollect.errors import BudgetTooSmallError, ScheduleError
from recollect.pipelines.playback import StageTimes, step_s
from recollect.pipelines.rank_profile import rank_profile, shortened, stage_plan, unit_path
from recollect.pipelines.schedule import PipelineSchedule, schedule_of
from recollect.planning.choose import Planner
from recollect.plans.plan import Plan
from recollect.profile.events import BACKWARD
from recollect.profile.profile import Profile
from recollect.progress.stage import stage as progress_stage
from recollect.quantities import parse_budget
from recollect.simulation.decisions import decide
from recollect.simulation.simulate import simulate
from recollect.simulation.timeline import timeline

__all__ = ["PipelinePlan", "plan_pipeline", "predict_pipeline"]


@dataclass(frozen=True, repr=False)
class PipelinePlan:
    """Plans for the stages of a pipeline, with what the schedule is predicted to need under them.

    Attributes:
        plans: one for each stage; apply each to its stage.
        peaks_bytes: the most bytes that each rank holds.
        step_s: seconds from the first forward to the last backward.
        plain_step_s: the same without recompute.
        in_flight: of each stage, the most micro-batches between forward and backward.
        schedule: what each rank runs.
        budget_bytes: of each device; None if the plans were given.
    """

    plans: tuple[Plan, ...]
    peaks_bytes: tuple[int, ...]
    step_s: float
    plain_step_s: float
    in_flight: tuple[int, ...]
    schedule: PipelineSchedule
    budget_bytes: int | None = None

    @property
    def peak_bytes(self) -> int:
        """Bytes of the rank that needs most."""
        return max(self.peaks_bytes)

    @property
    def slowdown(self) -> float:
        """What recompute adds to the step; 0.03 is 3 %."""
        return self.step_s / self.plain_step_s - 1 if self.plain_step_s > 0 else 0.0

    def __repr__(self) -> str:
        budget = "" if self.budget_bytes is None else f"budget {format_bytes(self.budget_bytes)} a device, "
        lines = [
            f"{budget}peak {format_bytes(self.peak_bytes)}, step {self.slowdown:+.1%}",
            f"{'rank':>4}  {'peak':>10}  {'stage':>5}  {'in flight':>9}  {'recompute':>9}",
        ]
        for rank, nbytes in enumerate(self.peaks_bytes):
            for number, stage in enumerate(self.schedule.stages_of(rank)):
                whole = f"{rank:>4}  {format_bytes(nbytes):>10}" if number == 0 else " " * 16
                share = f"{self.plans[stage].predicted_slowdown or 0.0:+.1%}"
                lines.append(f"{whole}  {stage:>5}  {self.in_flight[stage]:>9}  {share:>9}")
        return "\n".join(lines)


def plan_pipeline(
    profiles: Sequence[Profile], schedule: Any, budget: int | str, *, send_s: float = 0.0
) -> PipelinePlan:
    """Choose a plan for each stage, so that no rank exceeds the budget at any moment of the schedule.

    A stage holds as many micro-batches as its rank's actions have in flight: under 1F1B the first rank holds as many as there
    are ranks, the last one a single one, so plans get faster along the pipeline. Ranks do not share memory, and a step takes
    no longer if any rank is faster, so that each rank is planned by itself.

    Args:
        profiles: one for each stage, in order, of one micro-batch:
            `record(stage, micro_batch, loss_fn=..., gradients="accumulated", holds_output=False)`, where the input of all but
            the first requires grad. Stages that are alike may share one.
        schedule: a `PipelineSchedule`, such as `PipelineSchedule.one_f_one_b(...)`; a schedule object of
            `torch.distributed.pipelining`, or each rank's actions as torch writes them: `[["0F0", "0B0"], ...]`.
        budget: bytes of each device, as an int or text: "22GiB", or "60%" of what the fullest rank needs without recompute.
        send_s: seconds to send a micro-batch to the next stage.

    Returns:
        The plans, the peak of each rank, and the time of the step.

    Raises:
        BudgetTooSmallError: the leanest plans of a rank's stages need more.
        ScheduleError: the schedule cannot run, or has another number of stages than there are profiles.
        NotYetError: backward is split in two (zero bubble).
        ProfileFormatError: a profile without gradients that accumulate.
        ArgumentError, QuantityError: an argument of another kind; a budget that is no amount.

    Example:
        >>> import torch, recollect
        >>> from torch import nn
        >>> stage = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)))
        >>> micro_batch = torch.randn(16, 32, requires_grad=True)
        >>> profile = recollect.record(
        ...     stage,
        ...     micro_batch,
        ...     loss_fn=lambda out: out.sum(),
        ...     gradients="accumulated",
        ...     holds_output=False,
        ...     fake=True,
        ... )
        >>> planned = plan_pipeline(
        ...     [profile] * 2, recollect.PipelineSchedule.one_f_one_b(num_stages=2, num_micro_batches=4), "80%"
        ... )
        >>> planned.in_flight, planned.peak_bytes <= planned.budget_bytes
        ((2, 1), True)
    """
    found = _checked(profiles, schedule, "plan_pipeline(profiles, schedule, budget)")
    with progress_stage("planning the pipeline"):
        planners = [Planner(profile) for profile in _ranks(found, profiles)]
        plain_peak_bytes = max(planner.plain_peak_bytes for planner in planners)
        device_bytes = min(profile.device_memory_bytes for profile in profiles)
        budget_bytes = parse_budget(budget, reference_bytes=plain_peak_bytes, device_bytes=device_bytes)
        made: dict[int, Plan] = {}
        peaks = []
        for rank, planner in enumerate(planners):
            try:
                chosen = planner.plan(budget_bytes)
            except BudgetTooSmallError as error:
                raise _too_small(error, found, rank, plain_peak_bytes) from None
            peaks.append(chosen.predicted_peak_bytes or 0)
            made |= {stage: stage_plan(chosen, stage, profiles[stage]) for stage in found.stages_of(rank)}
    plans = [made[stage] for stage in range(found.num_stages)]
    return replace(_predicted(found, profiles, plans, peaks, send_s), budget_bytes=budget_bytes)


def predict_pipeline(
    profiles: Sequence[Profile], schedule: Any, plans: Sequence[Plan], *, send_s: float = 0.0
) -> PipelinePlan:
    """Predict what a pipeline needs under given plans, such as the same setting for all stages.

    Args:
        profiles: see `plan_pipeline`.
        schedule: see `plan_pipeline`.
        plans: one for each stage.
        send_s: see `plan_pipeline`.

    Returns:
        The plans with their own slowdowns, the peak of each rank, and the time of the step.

    Raises:
        ScheduleError: the schedule cannot run, or has another number of stages than there are profiles or plans.
        NotYetError, ProfileFormatError, ArgumentError: as `plan_pipeline`.

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
    found = _checked(profiles, schedule, "predict_pipeline(profiles, schedule, plans)")
    if len(plans) != len(profiles):
        raise ScheduleError(f"got {len(plans)} plans for {len(profiles)} stages, expected one for each")
    peaks = []
    for rank, profile in enumerate(_ranks(found, profiles)):
        units = {
            unit_path(stage, path): unit for stage in found.stages_of(rank) for path, unit in plans[stage].units.items()
        }
        peaks.append(simulate(profile, decide(profile, Plan(units))).peak_bytes)
    return _predicted(found, profiles, plans, peaks, send_s)


def _checked(profiles: Sequence[Profile], schedule: Any, call: str) -> PipelineSchedule:
    for profile in profiles:
        check_kind(call, "profiles", profile, Profile, "recollect.Profile")
    found = schedule_of(schedule)
    if len(profiles) != found.num_stages:
        raise ScheduleError(
            f"got {len(profiles)} profiles for a schedule of {found.num_stages} stages, expected one for each"
        )
    return found


def _ranks(schedule: PipelineSchedule, profiles: Sequence[Profile]) -> list[Profile]:
    """Return the step of each rank."""
    count, holds_sent = schedule.num_micro_batches, schedule.holds_sent
    return [rank_profile(shortened(actions), profiles, count, holds_sent=holds_sent) for actions in schedule.ranks]


def _predicted(
    schedule: PipelineSchedule, profiles: Sequence[Profile], plans: Sequence[Plan], peaks: Sequence[int], send_s: float
) -> PipelinePlan:
    """Return plans of the stages with their own slowdowns, and the step's times."""
    added_s = [
        simulate(profile, decide(profile, made)).recompute_s for profile, made in zip(profiles, plans, strict=True)
    ]
    forward_s = [_forward_s(profile) for profile in profiles]
    plain = [StageTimes(f, profile.step_s - f) for f, profile in zip(forward_s, profiles, strict=True)]
    planned = [StageTimes(t.forward_s, t.backward_s + extra) for t, extra in zip(plain, added_s, strict=True)]
    slowdowns = [
        extra / profile.step_s if profile.step_s else 0.0 for extra, profile in zip(added_s, profiles, strict=True)
    ]
    return PipelinePlan(
        plans=tuple(replace(made, predicted_slowdown=share) for made, share in zip(plans, slowdowns, strict=True)),
        peaks_bytes=tuple(peaks),
        step_s=step_s(schedule, planned, send_s=send_s),
        plain_step_s=step_s(schedule, plain, send_s=send_s),
        in_flight=tuple(schedule.most_in_flight(number) for number in range(len(profiles))),
        schedule=schedule,
    )


def _forward_s(profile: Profile) -> float:
    """Return the seconds from the first op of forward to the first of backward, without recompute."""
    plain = timeline(profile, Plan({}))
    is_backward = plain.phases == BACKWARD
    return float(plain.time_s[is_backward.argmax()]) if is_backward.any() else profile.step_s


def _too_small(error: BudgetTooSmallError, schedule: PipelineSchedule, rank: int, plain: int) -> BudgetTooSmallError:
    stage, _, path = error.unit.partition(".")
    where = f"{path or 'what is outside of the units'} of stage {stage}" if stage.isdigit() else error.unit
    return BudgetTooSmallError(
        budget_bytes=error.budget_bytes,
        least_peak_bytes=error.least_peak_bytes,
        unit=f"rank {rank} (stages {', '.join(map(str, schedule.stages_of(rank)))}; {where})",
        advice=("Use more ranks, smaller micro-batches, or a schedule with fewer of them in flight.",),
        plain_peak_bytes=plain,
    )
