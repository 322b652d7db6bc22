"""A pipeline to plan: its schedule, its recorded stages, and the cost of its ranks and its step under plans."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate

from recollect.byte_format import format_bytes
from recollect.errors import ScheduleError
from recollect.pipelines.rank import Rank, RankStage, RecordedStage, StageParts, first_actions, left_out
from recollect.pipelines.rank_profile import RankStep, rank_step, stage_plan, unit_path
from recollect.pipelines.schedule import (
    BACKWARD,
    FORWARD,
    INPUT,
    WEIGHT,
    PipelineAction,
    PipelineSchedule,
    played_s,
)
from recollect.plans.plan import Plan
from recollect.profile.events import StepLog
from recollect.profile.profile import Profile
from recollect.simulation.clocks import added_s, has_two_clocks
from recollect.simulation.decisions import CallActions, decide
from recollect.simulation.peak_sums import PeakSums
from recollect.simulation.simulate import simulate

StagePlans = Plan | Sequence[Plan]
"""A plan for all micro-batches of a stage, or one for each of them."""


@dataclass(frozen=True, repr=False)
class PipelinePlan:
    """Plans for the stages of a pipeline, with the predicted memory and time of the schedule under them.

    Attributes:
        plans: one for each stage; apply each to its stage. Under `predict_pipeline` with a plan for each micro-batch, tuples.
        peaks_bytes: the most bytes that each rank holds.
        step_s: seconds from the first forward to the last backward.
        plain_step_s: the same without recompute.
        slowdowns: of each stage, the part that recompute adds to its own work, averaged over micro-batches; 0.03 is 3 %.
        in_flight: of each stage, the most micro-batches between forward and the end of backward.
        schedule: the actions of each rank.
        budget_bytes: the budget of each device; None if the plans were given.
    """

    plans: tuple[Plan | tuple[Plan, ...], ...]
    peaks_bytes: tuple[int, ...]
    step_s: float
    plain_step_s: float
    slowdowns: tuple[float, ...]
    in_flight: tuple[int, ...]
    schedule: PipelineSchedule
    budget_bytes: int | None = None

    @property
    def peak_bytes(self) -> int:
        """Bytes of the rank that needs most."""
        return max(self.peaks_bytes)

    @property
    def slowdown(self) -> float:
        """Overhead of recompute in the step; 0.03 is 3 %."""
        return self.step_s / self.plain_step_s - 1 if self.plain_step_s > 0 else 0.0

    @property
    def loss_chunks(self) -> int:
        """Number of chunks of the last stage's loss, the same for all micro-batches."""
        last = self.plans[-1]
        return (last if isinstance(last, Plan) else last[0]).loss_chunks

    def __repr__(self) -> str:
        budget = "" if self.budget_bytes is None else f"budget {format_bytes(self.budget_bytes)} a device, "
        chunks = f", loss in {self.loss_chunks} chunks" if self.loss_chunks > 1 else ""
        lines = [
            f"{budget}peak {format_bytes(self.peak_bytes)}, step {self.slowdown:+.1%}{chunks}",
            f"{'rank':>4}  {'peak':>10}  {'stage':>5}  {'in flight':>9}  {'recompute':>9}",
        ]
        for rank, nbytes in enumerate(self.peaks_bytes):
            for number, stage in enumerate(self.schedule.stages_of(rank)):
                whole = f"{rank:>4}  {format_bytes(nbytes):>10}" if number == 0 else " " * 16
                lines.append(f"{whole}  {stage:>5}  {self.in_flight[stage]:>9}  {self.slowdowns[stage]:>+9.1%}")
        return "\n".join(lines)


class RecordedPieces:
    """Recorded stages, or parts of stages, in order, with the results computed once from each profile.

    `split_profiles` have a backward in halves; there are none if no schedule splits backwards.
    """

    def __init__(self, profiles: Sequence[Profile], split_profiles: Sequence[Profile] = ()) -> None:
        self._known_parts: dict[tuple[int, bool], StageParts] = {}
        last = len(profiles) - 1
        self.pieces = [
            RecordedStage(
                number,
                whole=self._parts(number, profile, is_last=number == last),
                # The first piece belongs to the first stage, which splits no backward.
                halves=self._parts(number, split_profiles[number], is_last=number == last)
                if split_profiles and number
                else None,
            )
            for number, profile in enumerate(profiles)
        ]
        # With the plan itself, whose `id` is part of the key.
        self._added: dict[tuple[int, int], tuple[Plan, tuple[float, float]]] = {}

    def _parts(self, number: int, profile: Profile, *, is_last: bool) -> StageParts:
        key = id(profile), is_last
        if key not in self._known_parts:
            self._known_parts[key] = StageParts(number, profile, is_last=is_last)
        return self._known_parts[key]

    def times(self, number: int, plan: Plan, *, is_first: bool) -> Mapping[str, float]:
        """Return the seconds of each kind of action of a piece under a plan; `is_first`: it is of the first stage."""
        recorded = self.pieces[number]
        forward_s = recorded.whole.forward_s
        backward_s = recorded.whole.profile.step_s - forward_s + sum(self.added_s(recorded.whole, plan))
        if is_first or recorded.halves is None:
            return {FORWARD: forward_s, BACKWARD: backward_s, INPUT: 0.0, WEIGHT: backward_s}
        rest_s = recorded.halves.profile.step_s - recorded.halves.forward_s
        share = recorded.halves.input_share
        first_s, second_s = self.added_s(recorded.halves, plan)
        return {
            FORWARD: forward_s,
            BACKWARD: backward_s,
            INPUT: rest_s * share + first_s,
            WEIGHT: rest_s * (1 - share) + second_s,
        }

    def added_s(self, parts: StageParts, plan: Plan) -> tuple[float, float]:
        """Return the seconds that a plan adds up to the end of the first half of backward, and after it."""
        key = id(parts), id(plan)
        if key not in self._added:
            profile = parts.profile
            decisions = decide(profile, plan)
            is_clocked, first_s = has_two_clocks(profile), 0.0
            whole_s = added_s(profile, decisions) if is_clocked else parts.sums.peaks(decisions).recompute_s
            if parts.parts[INPUT]:
                begun = (*parts.parts[FORWARD], *parts.parts[INPUT])
                first = replace(profile, log=StepLog(begun))
                first_s = added_s(first, decisions) if is_clocked else simulate(first, decisions).recompute_s
            self._added[key] = plan, (first_s, max(0.0, whole_s - first_s))
        return self._added[key][1]


class Pipeline:
    """A schedule with the recorded pieces that it runs. Results shared by several ranks or pieces are computed once."""

    def __init__(
        self, schedule: PipelineSchedule, recorded: RecordedPieces, sizes: Sequence[int] | None = None
    ) -> None:
        self.schedule = schedule
        self.recorded = recorded
        self._is_divided = sizes is not None
        # The step of a rank and what plays it: once for ranks that work alike, and for all plans.
        self._played = cache(lambda rank: ((step := rank_step(rank)), PeakSums.of(step.profile)))
        sizes = sizes or [1] * schedule.num_stages
        ends = list(accumulate(sizes))
        self.pieces_of = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        self.stage_of = [stage for stage, size in enumerate(sizes) for _ in range(size)]
        for stage in range(1, schedule.num_stages):
            if INPUT in schedule.backwards_of(stage) and recorded.pieces[ends[stage] - 1].halves is None:
                raise ScheduleError(
                    f"the schedule splits the backward of stage {stage} in two (zero bubble), expected split_profiles: "
                    "record each stage with split_backward=True"
                )

    @cached_property
    def ranks(self) -> list[Rank]:
        """The actions of each rank, with the fewest micro-batches that are representative."""
        return [self.rank(number, is_whole=False) for number in range(len(self.schedule.ranks))]

    def pieces_of_rank(self, number: int) -> list[int]:
        return [piece for stage in self.schedule.stages_of(number) for piece in self.pieces_of[stage]]

    def plans_of_pieces(self, plans: Sequence[Plan]) -> tuple[Plan, ...]:
        found = {
            piece: stage_plan(plan, number, self.recorded.pieces[piece].whole.profile)
            for rank, plan in enumerate(plans)
            for number, piece in enumerate(self.pieces_of_rank(rank))
        }
        return tuple(found[piece] for piece in sorted(found))

    def rank(self, number: int, *, is_whole: bool) -> Rank:
        """Return one rank's actions, with all micro-batches, or the fewest that are representative if alike."""
        own = self.pieces_of_rank(number)
        actions = [_as_run(action) for action in self.schedule.ranks[number]]
        run = [action for action in actions if action is not None]

        def by_piece(some: Sequence[PipelineAction]) -> tuple[PipelineAction, ...]:
            return tuple(
                replace(action, stage=own.index(piece))
                for action in some
                for piece in self.pieces_of[action.stage][:: 1 if action.kind == FORWARD else -1]
            )

        whole = run if is_whole else first_actions(run)
        some = by_piece(whole)
        return Rank(
            stages=tuple(self._rank_stage(piece, own) for piece in own),
            actions=some,
            num_micro_batches=self.schedule.num_micro_batches,
            loop=self.schedule.loop,
            as_needed=self.schedule.as_needed,
            receives=tuple(self._receives(number, set(whole), by_piece)),
            left_out=left_out(by_piece(run), some),
        )

    def _receives(
        self, number: int, some: Set[PipelineAction], by_piece: Callable[..., tuple[PipelineAction, ...]]
    ) -> Iterator[tuple[PipelineAction, PipelineAction]]:
        """Yield early receives of a rank, as (the action that needs one, the action before which its buffer is made)."""
        order = self.schedule.ranks[number]
        for needed, before in self.schedule.receives[number] if self.schedule.receives else ():
            # The first stage's gradient is for its whole backward.
            runs = replace(needed, kind=BACKWARD) if _as_run(needed) is None else needed
            if runs in some:
                later = (_as_run(action) for action in order[order.index(before) :])
                yield by_piece([runs])[0], by_piece([next(action for action in later if action in some)])[0]

    def _rank_stage(self, piece: int, own: Sequence[int]) -> RankStage:
        all_pieces = self.recorded.pieces
        is_last = piece == len(all_pieces) - 1
        stages = self.stage_of
        next_is_inside = not is_last and stages[piece + 1] == stages[piece]
        previous_is_inside = piece > 0 and stages[piece - 1] == stages[piece]
        # The first stage splits no backward, see `_as_run`.
        halves = None if stages[piece] == 0 else all_pieces[piece].halves
        return RankStage(
            recorded=replace(all_pieces[piece], halves=halves),
            output_bytes=all_pieces[piece].whole.output_bytes if is_last else all_pieces[piece + 1].whole.input_bytes,
            is_first=piece == 0,
            is_last=is_last,
            is_returned=is_last and self.schedule.return_outputs,
            next_is_here=piece + 1 in own and not next_is_inside,
            previous_is_here=piece - 1 in own and not previous_is_inside,
            next_is_inside=next_is_inside,
            previous_is_inside=previous_is_inside,
        )

    def peaks_bytes(self, plans: Sequence[StagePlans]) -> tuple[int, ...]:
        found = []
        for number in range(len(self.schedule.ranks)):
            own = [plans[piece] for piece in self.pieces_of_rank(number)]
            is_alike = all(isinstance(plan, Plan) for plan in own)
            rank = self.ranks[number] if is_alike else self.rank(number, is_whole=True)
            found.append(_peak_bytes(*self._played(rank), own))
        return tuple(found)

    def predicted(
        self, plans: Sequence[StagePlans], peaks_bytes: Sequence[int], *, send_s: float, budget_bytes: int | None = None
    ) -> PipelinePlan:
        plain = [Plan({})] * len(plans)
        return PipelinePlan(
            plans=tuple(self._stage_plans(stage, plans) for stage in range(self.schedule.num_stages)),
            peaks_bytes=tuple(peaks_bytes),
            step_s=self.step_s(plans, send_s=send_s),
            plain_step_s=self.step_s(plain, send_s=send_s),
            slowdowns=tuple(self._slowdown(stage, plans) for stage in range(self.schedule.num_stages)),
            in_flight=tuple(self.schedule.most_in_flight(stage) for stage in range(self.schedule.num_stages)),
            schedule=self.schedule,
            budget_bytes=budget_bytes,
        )

    def step_s(self, plans: Sequence[StagePlans], *, send_s: float) -> float:
        known: dict[tuple[int, str, tuple[int, ...]], float] = {}

        def lasts(action: PipelineAction) -> float:
            pieces = self.pieces_of[action.stage]
            own = [_of_micro_batch(plans[piece], action.micro_batch) for piece in pieces]
            key = action.stage, action.kind, tuple(id(plan) for plan in own)
            if key not in known:
                is_first = action.stage == 0
                times = [self.recorded.times(p, plan, is_first=is_first) for p, plan in zip(pieces, own, strict=True)]
                known[key] = sum(one[action.kind] for one in times)
            return known[key]

        return played_s(self.schedule, lasts, send_s=send_s)

    def _stage_plans(self, stage: int, plans: Sequence[StagePlans]) -> Plan | tuple[Plan, ...]:
        pieces = self.pieces_of[stage]
        if self._is_divided:
            units = {
                unit_path(number, path): unit
                for number, piece in enumerate(pieces)
                for path, unit in _of_micro_batch(plans[piece], 0).units.items()
            }
            chunks = _of_micro_batch(plans[pieces[-1]], 0).loss_chunks
            return Plan(units, predicted_slowdown=self._slowdown(stage, plans), loss_chunks=chunks)
        own = plans[pieces[0]]
        made = tuple(replace(p, predicted_slowdown=self._share(pieces[0], p)) for p in _all(own))
        return made[0] if isinstance(own, Plan) else made

    def _slowdown(self, stage: int, plans: Sequence[StagePlans]) -> float:
        pieces = self.pieces_of[stage]
        whole_s = sum(self._step_s(piece) for piece in pieces) or 1.0
        shares = ([self._share(piece, plan) for plan in _all(plans[piece])] for piece in pieces)
        added = (sum(own) / len(own) * self._step_s(piece) for piece, own in zip(pieces, shares, strict=True))
        return sum(added) / whole_s

    def _step_s(self, piece: int) -> float:
        return self._used(piece).profile.step_s

    def _share(self, piece: int, plan: Plan) -> float:
        parts = self._used(piece)
        return sum(self.recorded.added_s(parts, plan)) / (parts.profile.step_s or 1.0)

    def _used(self, piece: int) -> StageParts:
        """Return a piece's most frequent action: with a whole backward, if its stage ever runs one."""
        recorded, stage = self.recorded.pieces[piece], self.stage_of[piece]
        splits = stage > 0 and BACKWARD not in self.schedule.backwards_of(stage)
        return recorded.halves if splits and recorded.halves is not None else recorded.whole


def _as_run(action: PipelineAction) -> PipelineAction | None:
    """Return an action as torch runs it: the first stage runs a whole backward in place of the second half."""
    if action.stage or action.kind not in (INPUT, WEIGHT):
        return action
    return replace(action, kind=BACKWARD) if action.kind == WEIGHT else None


def _of_micro_batch(own: StagePlans, micro_batch: int) -> Plan:
    return own if isinstance(own, Plan) else own[micro_batch]


def _all(own: StagePlans) -> Sequence[Plan]:
    return [own] if isinstance(own, Plan) else own


def _peak_bytes(step: RankStep, sums: PeakSums, plans: Sequence[StagePlans]) -> int:
    known: dict[tuple[int, int], list[CallActions]] = {}
    decisions: list[CallActions] = []
    for number, micro_batch, profile in step.forwards:
        plan = _of_micro_batch(plans[number], micro_batch)
        key = id(profile), id(plan)
        if key not in known:
            known[key] = decide(profile, plan)
        decisions += known[key]
    return sums.peaks(decisions).peak_bytes
