"""A pipeline to plan: its schedule, its recorded stages, and what its ranks and its step come to under plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from recollect.errors import ScheduleError
from recollect.pipelines.pipeline_plan import PipelinePlan, StagePlans
from recollect.pipelines.playback import StageTimes, played_s
from recollect.pipelines.rank_profile import Rank, RankStage, RankStep, rank_step, shortened
from recollect.pipelines.schedule import BACKWARD, FORWARD, INPUT, PipelineAction, PipelineSchedule
from recollect.pipelines.stage_parts import RecordedStage, StageParts
from recollect.plans.plan import Plan
from recollect.profile import events
from recollect.profile.events import StepLog
from recollect.profile.profile import Profile
from recollect.simulation.call_actions import CallActions
from recollect.simulation.decisions import decide
from recollect.simulation.simulate import simulate
from recollect.simulation.timeline import timeline

__all__ = ["Pipeline"]


class Pipeline:
    """A schedule with the recorded stages that it runs. What several ranks or stages share is worked out once.

    Args:
        schedule: what each rank runs.
        profiles: of the stages, with a whole backward.
        split_profiles: of the stages, with a backward in halves; may be empty if the schedule splits none.

    Raises:
        ScheduleError: not one profile for each stage; the schedule splits backwards and there are no `split_profiles`.
        ProfileFormatError: a profile that is not of one micro-batch with gradients that accumulate.
    """

    def __init__(
        self, schedule: PipelineSchedule, profiles: Sequence[Profile], split_profiles: Sequence[Profile] = ()
    ) -> None:
        self.schedule = schedule
        num_stages = schedule.num_stages
        for name, found in (("profiles", profiles), ("split_profiles", split_profiles)):
            if len(found) != num_stages and (found or name == "profiles"):
                raise ScheduleError(
                    f"got {len(found)} {name} for a schedule of {num_stages} stages, expected one for each"
                )
        self._known_parts: dict[int, StageParts] = {}
        kinds = [schedule.backwards_of(stage) for stage in range(num_stages)]
        for number, kind in enumerate(kinds):
            if INPUT in kind and not split_profiles:
                raise ScheduleError(
                    f"the schedule splits the backward of stage {number} in two (zero bubble), expected split_profiles: "
                    "record each stage with split_backward=True"
                )
        self.stages = [
            RecordedStage(
                number,
                whole=self._parts(number, profiles[number]) if BACKWARD in kind else None,
                halves=self._parts(number, split_profiles[number]) if INPUT in kind else None,
            )
            for number, kind in enumerate(kinds)
        ]
        # With the plan itself, whose `id` is part of the key.
        self._added: dict[tuple[int, int], tuple[Plan, tuple[float, float]]] = {}
        self._forward_s: dict[int, float] = {}

    def _parts(self, number: int, profile: Profile) -> StageParts:
        if id(profile) not in self._known_parts:
            self._known_parts[id(profile)] = StageParts(number, profile)
        return self._known_parts[id(profile)]

    @cached_property
    def ranks(self) -> list[Rank]:
        """What each rank runs, with as few micro-batches as say the same."""
        return [self.rank(number, is_whole=False) for number in range(len(self.schedule.ranks))]

    def rank(self, number: int, *, is_whole: bool) -> Rank:
        """Return what one rank runs; with all of its micro-batches, or as few as say the same if they are alike."""
        numbers = self.schedule.stages_of(number)
        last = self.schedule.num_stages - 1
        stages = []
        for stage in numbers:
            parts = self.stages[stage].any
            stages.append(
                RankStage(
                    recorded=self.stages[stage],
                    output_bytes=parts.last_bytes if stage == last else self.stages[stage + 1].any.input_bytes,
                    is_first=stage == 0,
                    is_last=stage == last,
                    next_is_here=stage + 1 in numbers,
                    previous_is_here=stage - 1 in numbers,
                )
            )
        actions = tuple(replace(action, stage=numbers.index(action.stage)) for action in self.schedule.ranks[number])
        return Rank(
            stages=tuple(stages),
            actions=actions if is_whole else shortened(actions),
            num_micro_batches=self.schedule.num_micro_batches,
            holds_sent=self.schedule.holds_sent,
        )

    def peaks_bytes(self, plans: Sequence[StagePlans]) -> tuple[int, ...]:
        """Return the most bytes that each rank holds under given plans."""
        known: dict[object, int] = {}
        steps: dict[object, RankStep] = {}
        found = []
        for number in range(len(self.schedule.ranks)):
            own = [plans[stage] for stage in self.schedule.stages_of(number)]
            rank = self.rank(number, is_whole=not all(isinstance(plan, Plan) for plan in own))
            key = rank.key, tuple(id(plan) for plan in own)
            if key not in known:
                if rank.key not in steps:
                    steps[rank.key] = rank_step(rank)
                known[key] = _peak_bytes(steps[rank.key], own)
            found.append(known[key])
        return tuple(found)

    def predicted(
        self, plans: Sequence[StagePlans], peaks_bytes: Sequence[int], *, send_s: float, budget_bytes: int | None = None
    ) -> PipelinePlan:
        """Return plans of the stages with their own slowdowns, and the step's times.

        Raises:
            ScheduleError: the ranks wait for each other for ever.
        """
        planned = {(stage, id(plan)): self._times(stage, plan) for stage, own in enumerate(plans) for plan in _all(own)}
        plain_plan = Plan({})
        plain = [self._times(stage, plain_plan) for stage in range(len(plans))]
        made: list[Plan | tuple[Plan, ...]] = []
        slowdowns = []
        for stage, own in enumerate(plans):
            shares = [self._slowdown(stage, plan) for plan in _all(own)]
            given = [replace(plan, predicted_slowdown=share) for plan, share in zip(_all(own), shares, strict=True)]
            made.append(given[0] if isinstance(own, Plan) else tuple(given))
            slowdowns.append(sum(shares) / len(shares))
        schedule = self.schedule

        def lasts(action: PipelineAction) -> float:
            own = plans[action.stage]
            plan = own if isinstance(own, Plan) else own[action.micro_batch]
            return planned[action.stage, id(plan)].of(action.kind)

        return PipelinePlan(
            plans=tuple(made),
            peaks_bytes=tuple(peaks_bytes),
            step_s=played_s(schedule, lasts, send_s=send_s),
            plain_step_s=played_s(schedule, lambda action: plain[action.stage].of(action.kind), send_s=send_s),
            slowdowns=tuple(slowdowns),
            in_flight=tuple(schedule.most_in_flight(number) for number in range(len(plans))),
            schedule=schedule,
            budget_bytes=budget_bytes,
        )

    def _slowdown(self, stage: int, plan: Plan) -> float:
        parts = self.stages[stage].any
        first_s, second_s = self._added_s(parts, plan)
        return (first_s + second_s) / parts.profile.step_s if parts.profile.step_s else 0.0

    def _times(self, stage: int, plan: Plan) -> StageTimes:
        """Return the seconds of each action of a stage under a plan."""
        recorded = self.stages[stage]
        forward_s = self._plain_forward_s(recorded.any.profile)
        backward_s = input_s = weight_s = 0.0
        if recorded.whole is not None:
            whole = recorded.whole.profile
            backward_s = whole.step_s - self._plain_forward_s(whole) + sum(self._added_s(recorded.whole, plan))
        if recorded.halves is not None:
            halves = recorded.halves.profile
            rest_s = halves.step_s - self._plain_forward_s(halves)
            share = recorded.halves.input_share
            first_s, second_s = self._added_s(recorded.halves, plan)
            input_s, weight_s = rest_s * share + first_s, rest_s * (1 - share) + second_s
        return StageTimes(forward_s, backward_s, input_s, weight_s)

    def _added_s(self, parts: StageParts, plan: Plan) -> tuple[float, float]:
        """Return the seconds that a plan adds up to the end of the first half of backward, and after it."""
        key = id(parts), id(plan)
        if key not in self._added:
            profile = parts.profile
            decisions = decide(profile, plan)
            whole_s = simulate(profile, decisions).recompute_s
            first_s = 0.0
            if parts.parts[INPUT]:
                begun = (*parts.parts[FORWARD], *parts.parts[INPUT])
                first = replace(profile, log=StepLog(blocks=(begun,), sequence=((0, -1),)))
                first_s = simulate(first, decisions).recompute_s
            self._added[key] = plan, (first_s, whole_s - first_s)
        return self._added[key][1]

    def _plain_forward_s(self, profile: Profile) -> float:
        """Return the seconds from the first op of forward to the first of backward, without recompute."""
        if id(profile) not in self._forward_s:
            plain = timeline(profile, Plan({}))
            is_backward = plain.phases == events.BACKWARD
            self._forward_s[id(profile)] = (
                float(plain.time_s[is_backward.argmax()]) if is_backward.any() else profile.step_s
            )
        return self._forward_s[id(profile)]


def _all(own: StagePlans) -> Sequence[Plan]:
    return [own] if isinstance(own, Plan) else own


def _peak_bytes(step: RankStep, plans: Sequence[StagePlans]) -> int:
    """Return the peak of a rank under the plans of its stages."""
    known: dict[tuple[int, int], list[CallActions]] = {}
    decisions: list[CallActions] = []
    for number, micro_batch, profile in step.forwards:
        own = plans[number]
        plan = own if isinstance(own, Plan) else own[micro_batch]
        key = id(profile), id(plan)
        if key not in known:
            known[key] = decide(profile, plan)
        decisions += known[key]
    return simulate(step.profile, decisions).peak_bytes
