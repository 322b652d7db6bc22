"""`split_pipeline`: which layers go to which stage, chosen together with the plans."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import permutations
from typing import Any, Final

from recollect.arguments import check_kind
from recollect.errors import BudgetTooSmallError, ScheduleError
from recollect.pipelines.pipeline import Pipeline, PipelinePlan, RecordedPieces
from recollect.pipelines.rank import Rank
from recollect.pipelines.rank_bound import rank_planner
from recollect.pipelines.schedule import PipelineSchedule, schedule_of
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile
from recollect.progress import stage as progress_stage
from recollect.quantities import parse_budget

# All of eight stages.
_MOST_MOVES: Final = 56


@dataclass(frozen=True, repr=False)
class PipelineSplit:
    """Layers divided among the stages of a pipeline, with plans.

    Attributes:
        layers: of each stage, in order.
        pipeline: the prediction; a stage's units are named as in an `nn.Sequential` of its layers: `<number>.<path>`.
        even_step_s: seconds of the step with as many layers in each stage, or one more in the first ones; None if that exceeds
            the budget.
    """

    layers: tuple[range, ...]
    pipeline: PipelinePlan
    even_step_s: float | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many layers each stage has."""
        return tuple(len(own) for own in self.layers)

    def __repr__(self) -> str:
        return f"{self.summary}\n{self.pipeline!r}"

    @property
    def summary(self) -> str:
        """The layers of each stage, and the cost of an even split, in one line."""
        even_s, step_s = self.even_step_s, self.pipeline.step_s
        against = (
            "as many in each are too many" if even_s is None else f"as many in each: step {even_s / step_s - 1:+.1%}"
        )
        return f"layers by stage: {', '.join(map(str, self.sizes))} ({against})"


def split_pipeline(
    layers: Sequence[Profile],
    schedule: Any,
    budget: int | str,
    *,
    split_layers: Sequence[Profile] = (),
    send_s: float = 0.0,
    return_outputs: bool = True,
) -> PipelineSplit:
    """Divide layers among stages to find the shortest step, planned within the budget.

    An early stage holds more micro-batches and has to recompute more: with fewer layers it is not slower than the others. The
    embedding and the head also count with their costs. From the even split, and from the one that is fastest without
    recompute, layers move one by one from any stage to any other as long as the step gets shorter, each time with new plans for
    every rank. It ends where no single move helps (of the 56 that are fastest without recompute, with more
    than eight stages); on pipelines small enough to try all splits that was within
    1 % of the shortest (docs/pipelines.md).

    Args:
        layers: in the order of the model, such as embedding, layers and head, each recorded on one micro-batch as a stage
            is for `plan_pipeline`: `record(layer, x, loss_fn=torch.sum, gradients="accumulated", holds_output=False)`, where
            the input of all but the first requires grad. Layers that are alike may share one.
        schedule: see `plan_pipeline`.
        budget: of each device; a percentage is of the fullest rank's peak in the even split, without recompute.
        split_layers: for a schedule that splits backward in two: the same layers recorded with `split_backward=True`.
        send_s: see `plan_pipeline`.
        return_outputs: see `plan_pipeline`.

    Returns:
        The layers of each stage, and the plans.

    Raises:
        BudgetTooSmallError: no split that was tried fits.
        ScheduleError: fewer layers than stages, or as `plan_pipeline`.
        ProfileFormatError, ArgumentError, QuantityError: as `plan_pipeline`.

    Complexity: planning one rank for each split that differs in it; some hundred plans for 16 layers on 4 stages.

    Example:
        >>> import torch, recollect
        >>> from torch import nn
        >>> def recorded(needs_grad):
        ...     layer = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
        ...     x = torch.randn(16, 32, requires_grad=needs_grad)
        ...     return recollect.record(
        ...         layer, x, loss_fn=torch.sum, gradients="accumulated", holds_output=False, fake=True, units=[""]
        ...     )
        >>> first, middle = recorded(False), recorded(True)
        >>> schedule = recollect.PipelineSchedule.one_f_one_b(num_stages=2, num_micro_batches=4)
        >>> found = split_pipeline([first, *[middle] * 5], schedule, "90%")
        >>> sum(found.sizes), found.pipeline.peak_bytes <= found.pipeline.budget_bytes
        (6, True)
    """
    for name, given in (("layers", layers), ("split_layers", split_layers)):
        for profile in given:
            check_kind("split_pipeline(layers, schedule, budget)", name, profile, Profile, "recollect.Profile")
    found = schedule_of(schedule)
    found = replace(found, return_outputs=return_outputs and found.return_outputs)
    if len(layers) < found.num_stages:
        raise ScheduleError(
            f"got {len(layers)} layers for a schedule of {found.num_stages} stages, expected one or more each"
        )
    if split_layers and len(split_layers) != len(layers):
        raise ScheduleError(f"got {len(split_layers)} split_layers for {len(layers)} layers, expected one for each")
    with progress_stage("dividing the layers"):
        return _Search(layers, split_layers, found, budget, send_s).result()


@dataclass(frozen=True, order=True)
class _Found:
    """A split under plans: the bytes by which the fullest rank exceeds the budget, and the step's time. Lower is better."""

    shortfall_bytes: int
    step_s: float
    sizes: tuple[int, ...]
    plans: tuple[Plan, ...] = field(default=(), compare=False)
    peaks_bytes: tuple[int, ...] = field(default=(), compare=False)


@dataclass(eq=False)
class _Search:
    """Descends from a split to its neighbours, and remembers every rank that it planned, and every split."""

    layers: Sequence[Profile]
    split_layers: Sequence[Profile]
    schedule: PipelineSchedule
    budget: int | str
    send_s: float

    def __post_init__(self) -> None:
        self._recorded = RecordedPieces(self.layers, self.split_layers)
        self._planner = cache(rank_planner)
        self._plan = cache(self._planned)
        self._plain = cache(self._plain_s)
        self._at = cache(self._planned_at)
        num_stages = self.schedule.num_stages
        share, rest = divmod(len(self.layers), num_stages)
        self._even = tuple(share + (stage < rest) for stage in range(num_stages))
        ranks = self._pipeline(self._even).ranks
        self._plain_peak_bytes = max(self._planner(rank).plain_peak_bytes for rank in ranks)
        device_bytes = min(profile.device_memory_bytes for profile in self.layers)
        self._budget_bytes = parse_budget(
            self.budget, reference_bytes=self._plain_peak_bytes, device_bytes=device_bytes
        )

    def result(self) -> PipelineSplit:
        best = min(self._descend(start) for start in dict.fromkeys([self._even, self._fastest_plain()]))
        if best.shortfall_bytes:
            sizes = ", ".join(map(str, best.sizes))
            raise BudgetTooSmallError(
                budget_bytes=self._budget_bytes,
                least_peak_bytes=self._budget_bytes + best.shortfall_bytes,
                unit=f"the fullest rank of the leanest split that was found ({sizes} layers by stage)",
                advice=("Use more ranks or smaller micro-batches.",),
                plain_peak_bytes=self._plain_peak_bytes,
            )
        pipeline = self._pipeline(best.sizes)
        predicted = pipeline.predicted(
            best.plans, best.peaks_bytes, send_s=self.send_s, budget_bytes=self._budget_bytes
        )
        even = self._at(self._even)
        return PipelineSplit(tuple(pipeline.pieces_of), predicted, None if even.shortfall_bytes else even.step_s)

    def _pipeline(self, sizes: tuple[int, ...]) -> Pipeline:
        return Pipeline(self.schedule, self._recorded, sizes)

    def _planned(self, rank: Rank) -> Plan | BudgetTooSmallError:
        try:
            return self._planner(rank).plan(self._budget_bytes)
        except BudgetTooSmallError as error:
            return error

    def _fastest_plain(self) -> tuple[int, ...]:
        """Return a split for which no single move shortens the step without recompute."""
        best = self._even
        while True:
            found = min(_neighbours(best), key=lambda sizes: (self._plain(sizes), sizes), default=best)
            if self._plain(found) >= self._plain(best):
                return best
            best = found

    def _plain_s(self, sizes: tuple[int, ...]) -> float:
        return self._pipeline(sizes).step_s([Plan({})] * len(self.layers), send_s=self.send_s)

    def _descend(self, start: tuple[int, ...]) -> _Found:
        best = self._at(start)
        while True:
            before = best
            # No plan makes a split faster than without recompute.
            moved = sorted(_neighbours(best.sizes), key=lambda sizes: (self._plain(sizes), sizes))
            for sizes in moved if best.shortfall_bytes else moved[:_MOST_MOVES]:
                if best.shortfall_bytes or self._plain(sizes) < best.step_s:
                    best = min(best, self._at(sizes))
            if best is before:
                return best

    def _planned_at(self, sizes: tuple[int, ...]) -> _Found:
        pipeline = self._pipeline(sizes)
        chosen = [self._plan(rank) for rank in pipeline.ranks]
        if errors := [plan for plan in chosen if isinstance(plan, BudgetTooSmallError)]:
            shortfall_bytes = max(error.least_peak_bytes for error in errors) - self._budget_bytes
            return _Found(shortfall_bytes, self._plain(sizes), sizes)
        fitting = [plan for plan in chosen if isinstance(plan, Plan)]
        plans = pipeline.plans_of_pieces(fitting)
        peaks_bytes = tuple(plan.predicted_peak_bytes or 0 for plan in fitting)
        return _Found(0, pipeline.step_s(plans, send_s=self.send_s), sizes, plans, peaks_bytes)


def _neighbours(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the splits that move one layer from one stage to a different one."""
    found = []
    for giver, taker in permutations(range(len(sizes)), 2):
        if sizes[giver] > 1:
            moved = list(sizes)
            moved[giver] -= 1
            moved[taker] += 1
            found.append(tuple(moved))
    return found
