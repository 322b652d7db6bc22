"""Search for the largest batch that fits a budget, and the fastest one: without recompute, with full recompute, and planned.

Each size that is tried is recorded and planned, which takes a second or more, so the search tries few. Peaks are nearly linear
in the size: the next size to try is where the line through two known peaks meets the budget, and every third one halves the
rest (or doubles, while every size fits), in case the peaks bend. An answer is a size that fits, recorded, next to one that does
not, recorded too.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from recollect.byte_format import format_bytes
from recollect.errors import BudgetTooSmallError, ConfigError, RecollectError, RecordError
from recollect.planning.choose import advice
from recollect.planning.classic import classic_plan
from recollect.planning.planners import planner_for
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile
from recollect.progress import stage
from recollect.quantities import parse_budget

MAX_SIZE = 2**20
# Where the peak does not grow yet, as in the optimizer's step, a line predicts nothing.
_MOST_GROWTH = 4
# The speed hardly changes at its maximum: neighbors this close to it, as a fraction, are as fast.
_SAME_SPEED = 0.005
_MOST_REFINEMENTS = 8


@dataclass(frozen=True, kw_only=True)
class TriedSize:
    """The step of one size, as recorded.

    Attributes:
        size: the argument of `make_batch`.
        num_tokens: tokens in the batch.
        step_s: predicted seconds of forward and backward without recompute.
        plain_peak_bytes: predicted peak without recompute.
        full_peak_bytes, full_slowdown: predictions for full recompute of every layer.
        least_peak_bytes: the lowest peak of any plan that the planner knows, where that is above the budget; else None.
        plan: the plan for the budget; None if no plan fits.
    """

    size: int
    num_tokens: int
    step_s: float
    plain_peak_bytes: int
    full_peak_bytes: int
    full_slowdown: float
    least_peak_bytes: int | None
    plan: Plan | None

    @property
    def peak_bytes(self) -> int | None:
        return None if self.plan is None else self.plan.predicted_peak_bytes

    @property
    def slowdown(self) -> float | None:
        return None if self.plan is None else self.plan.predicted_slowdown

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of forward and backward under the plan."""
        return None if self.slowdown is None else self.tokens_per_s_at(self.slowdown)

    def tokens_per_s_at(self, slowdown: float) -> float:
        """Return tokens per second of forward and backward at a slowdown; 0 if times are unknown."""
        seconds = self.step_s * (1 + slowdown)
        return self.num_tokens / seconds if seconds > 0 else 0.0


@dataclass(frozen=True, repr=False)
class LargestBatch:
    """What `largest_batch` found.

    Attributes:
        along: a word for the size, such as "micro-batch".
        budget_bytes: the bound on the peak of the whole step.
        tried: all sizes that were recorded, smallest first.
        without_recompute: the largest size that fits if everything is kept; None if none does.
        full_recompute: the largest size that fits with full recompute of every layer; None if none does.
        planned: the largest size that fits with a plan by recollect.
        fastest: the size with most tokens per second, with the plan for the budget, of those recorded.
        limit: the largest size that was allowed. An answer of this size means "at least".
        device_name: the device the times are for.
    """

    along: str
    budget_bytes: int
    tried: tuple[TriedSize, ...]
    without_recompute: TriedSize | None
    full_recompute: TriedSize | None
    planned: TriedSize
    fastest: TriedSize
    limit: int
    device_name: str = ""

    def size_text(self, found: TriedSize | None) -> str:
        """Describe an answer: "12", "none", or "at least 64" if larger sizes were not allowed."""
        if found is None:
            return "none"
        return f"at least {found.size:,}" if found.size == self.limit else f"{found.size:,}"

    def __repr__(self) -> str:
        lines = [f"largest {self.along} within {format_bytes(self.budget_bytes)}"]
        lines.append(f"  without recompute    {self.size_text(self.without_recompute)}")
        lines.append(f"  with full recompute  {self.size_text(self.full_recompute)}")
        lines.append(f"  with a plan          {self.size_text(self.planned)}")
        speed = f"{self.fastest.tokens_per_s or 0:,.0f} tokens/s of {self.device_name or 'an unknown device'}"
        lines.append(f"most tokens per second at {self.along} {self.fastest.size:,}: {speed}, modelled")
        return "\n".join(lines)


def search_batches(
    record: Callable[[int], Profile],
    budget: int | str,
    *,
    tokens_each: int = 1,
    multiple_of: int = 1,
    max_size: int = MAX_SIZE,
    along: str = "size",
) -> LargestBatch:
    """Find the largest and the fastest batch within a budget, by recording a few sizes."""
    for name, value in (("tokens_each", tokens_each), ("multiple_of", multiple_of), ("max_size", max_size)):
        if type(value) is not int or value < 1:
            raise ConfigError(
                settings={name: value},
                reason="not a whole number, 1 or more",
                advice=f"Set {name} to one, or leave it out.",
            )
    if max_size < multiple_of:
        raise ConfigError(
            settings={"multiple_of": multiple_of, "max_size": max_size},
            reason="no size is a multiple within the limit",
            advice=f"Set max_size to {multiple_of} or more.",
        )
    # Before anything is recorded; the device's size is known only then.
    parse_budget(budget, reference_bytes=None, device_bytes=1)
    with stage("looking for the largest batch"):
        return _Search(record, budget, tokens_each, multiple_of, max_size // multiple_of, along).run()


@dataclass
class _Search:
    """One search. Inside, sizes are numbers of multiples: 1 is the smallest size, `most` the largest."""

    record: Callable[[int], Profile]
    budget: int | str
    tokens_each: int
    multiple_of: int
    most: int
    along: str
    budget_bytes: int = 0
    device_name: str = ""
    tried: dict[int, TriedSize] = field(default_factory=dict)

    def run(self) -> LargestBatch:
        self._try(1)
        planned = self._largest(lambda tried: tried.plan is not None, self._about_least_bytes)
        assert planned is not None  # the smallest size fits
        self._check_growth()
        full = self._largest(lambda t: t.full_peak_bytes <= self.budget_bytes, lambda t: t.full_peak_bytes)
        plain = self._largest(lambda t: t.plain_peak_bytes <= self.budget_bytes, lambda t: t.plain_peak_bytes)
        self._refine_fastest()
        return LargestBatch(
            along=self.along,
            budget_bytes=self.budget_bytes,
            tried=tuple(self.tried[number] for number in sorted(self.tried)),
            without_recompute=plain,
            full_recompute=full,
            planned=planned,
            fastest=self.tried[self._fastest()],
            limit=self.most * self.multiple_of,
            device_name=self.device_name,
        )

    def _largest(self, fits: Callable[[TriedSize], bool], peak_bytes: Callable[[TriedSize], float]) -> TriedSize | None:
        """Return the largest size that fits, having tried the next one; None if the smallest does not fit."""
        num_tries = 0
        while True:
            low = max((number for number, tried in self.tried.items() if fits(tried)), default=0)
            high = min((number for number in self.tried if number > low), default=self.most + 1)
            if high - low <= 1:
                return self.tried.get(low)
            bounded = high in self.tried
            on_line = None if num_tries % 3 == 2 else self._on_line(peak_bytes)
            middle = (low + high) // 2 if bounded else 2 * low
            last = high - 1 if bounded else min(_MOST_GROWTH * low, self.most)
            self._try(min(max(middle if on_line is None else on_line, low + 1), last))
            num_tries += 1

    def _on_line(self, peak_bytes: Callable[[TriedSize], float]) -> int | None:
        """Return where the line through two known peaks, nearest to the budget, meets the budget; None if it does not."""
        points = sorted((number, peak_bytes(tried)) for number, tried in self.tried.items())
        num_below = sum(nbytes <= self.budget_bytes for _, nbytes in points)
        pair = points[max(0, min(num_below - 1, len(points) - 2)) :][:2]
        if len(pair) < 2 or pair[1][1] <= pair[0][1]:
            return None
        (first, first_bytes), (second, second_bytes) = pair
        return int(first + (self.budget_bytes - first_bytes) * (second - first) / (second_bytes - first_bytes))

    def _about_least_bytes(self, tried: TriedSize) -> float:
        """Estimate the lowest peak: known where no plan fits, and elsewhere at the same distance below full recompute."""
        if tried.least_peak_bytes is not None:
            return tried.least_peak_bytes
        known = [t.least_peak_bytes / t.full_peak_bytes for t in self.tried.values() if t.least_peak_bytes is not None]
        return tried.full_peak_bytes * min(known, default=1.0)

    def _refine_fastest(self) -> None:
        """Try sizes around the fastest one until no size lies between it and its neighbours, or they are as fast."""
        for _ in range(_MOST_REFINEMENTS):
            best = self._fastest()
            fitting = sorted(number for number, tried in self.tried.items() if tried.plan is not None)
            place = fitting.index(best)
            around = fitting[max(0, place - 1) : place + 2]
            slowest = min(self.tried[number].tokens_per_s or 0.0 for number in around)
            gap, low = max(((high - low, low) for low, high in itertools.pairwise(around)), default=(0, 0))
            if gap <= 1 or slowest >= (1 - _SAME_SPEED) * (self.tried[best].tokens_per_s or 0.0):
                return
            self._try(low + gap // 2)

    def _fastest(self) -> int:
        return max(sorted(self.tried), key=lambda number: self.tried[number].tokens_per_s or 0.0)

    def _check_growth(self) -> None:
        """Check that the step depends on the size, if even the largest one fits."""
        first, last = self.tried[1], self.tried.get(self.most)
        if last is None or last is first or last.plan is None:
            return
        if (first.plain_peak_bytes, first.step_s) == (last.plain_peak_bytes, last.step_s):
            raise RecordError(
                f"the steps of {self.along} {first.size} and {last.size} are the same, expected one that grows "
                "with the size: make_batch has to use its argument."
            )

    def _try(self, number: int) -> None:
        size = number * self.multiple_of
        profile = self._recorded(size)
        planner = planner_for(profile)
        if not self.tried:
            self.device_name = profile.device_name
            device_bytes = profile.device_memory_bytes
            self.budget_bytes = parse_budget(self.budget, reference_bytes=None, device_bytes=device_bytes)
        made, least_bytes = None, None
        try:
            made = planner.plan(self.budget_bytes)
        except BudgetTooSmallError as error:
            if not self.tried:
                raise self._nothing_fits(error, profile, size) from None
            least_bytes = error.least_peak_bytes
        full = classic_plan(profile, "full")
        self.tried[number] = TriedSize(
            size=size,
            num_tokens=size * self.tokens_each,
            step_s=profile.step_s,
            plain_peak_bytes=planner.plain_peak_bytes,
            full_peak_bytes=full.predicted_peak_bytes or 0,
            full_slowdown=full.predicted_slowdown or 0.0,
            least_peak_bytes=least_bytes,
            plan=made,
        )

    def _recorded(self, size: int) -> Profile:
        before = max((tried.size for tried in self.tried.values()), default=0)
        try:
            return self.record(size)
        except RecollectError as error:
            if not before and not isinstance(error, RecordError):
                raise  # of the model or the settings, whatever the size
            hint = (
                f" {self.along} {before} could be recorded; if the model takes no more, set max_size." if before else ""
            )
            raise RecordError(f"{self.along} {size}: {error}{hint}") from error

    def _nothing_fits(self, error: BudgetTooSmallError, profile: Profile, size: int) -> BudgetTooSmallError:
        remedies = advice(
            profile,
            budget_bytes=error.budget_bytes,
            least_peak_bytes=error.least_peak_bytes,
            peak_call=error.unit,
            is_smallest=True,
        )
        return error.changed(advice=(f"No smaller {self.along} than {size} is allowed.", *remedies), plain_peak_bytes=0)
