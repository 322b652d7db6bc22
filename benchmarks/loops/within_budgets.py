"""Run a loop without recollect and within budgets; compare peaks with budgets, and weights bit for bit."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from allocator_meter import AllocatorMeter
from loops.loop import Loop
from loops.run import Ran, run
from recollect.errors import BudgetTooSmallError
from recollect.planning.choose import Planner

__all__ = ["BUDGETS", "Row", "rows"]

BUDGETS = {"least": 0.0, "half way": 0.5, "near the least": 0.1}
"""Parts of the way from the least budget of the loop to its peak without recollect."""
_ROOM = 1.02  # above the least peak of the first step, for the steps after it


@dataclass(frozen=True)
class Row:
    """A loop within a budget.

    Attributes:
        loop: its name.
        budget: the name of the budget.
        budget_bytes: the budget.
        plain_bytes: the highest peak of any step without recollect.
        peak_bytes: the highest peak of any step within the budget.
        predicted_bytes: the highest predicted peak of any plan.
        num_batches: batches that were run.
        num_recorded: steps that were recorded, and planned.
        slowdown: predicted for the last plan.
        weights_equal: whether weights, buffers and random state at the end have the same bits as without recollect.
        unsaid_overruns: numbers of the batches above the budget before which nothing was said.
        overruns: numbers of all batches above the budget.
        silent_overruns: of them, those of which nothing was said by the end of the next batch.
        said: the first warning, or the error.
    """

    loop: str
    budget: str
    budget_bytes: int
    plain_bytes: int
    peak_bytes: int
    predicted_bytes: int
    num_batches: int
    num_recorded: int
    slowdown: float
    weights_equal: bool
    unsaid_overruns: list[int]
    overruns: list[int]
    silent_overruns: list[int]
    said: str

    def fields(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)

    @property
    def is_good(self) -> bool:
        """Whether the budget held, or was said not to, and training was the same."""
        return self.weights_equal and not self.unsaid_overruns


def rows(loop: Loop, meter: AllocatorMeter, budgets: Collection[str] = BUDGETS, num_batches: int = 0) -> Iterator[Row]:
    """Yield a row for each of the named budgets; `num_batches` instead of the loop's own."""
    plain = run(loop, meter, num_batches=num_batches)
    plain_bytes = max(plain.peaks_bytes)
    least_bytes = _least_bytes(loop, meter, num_batches)
    for name in budgets:
        budget_bytes = int(least_bytes + BUDGETS[name] * (plain_bytes - least_bytes))
        within = run(loop, meter, budget_bytes, num_batches=num_batches)
        if within.error is not None:
            raise RuntimeError(f"{loop.name}: got {within.error!r} within {budget_bytes} bytes") from within.error
        yield _row(loop, name, budget_bytes, plain, within)


def _least_bytes(loop: Loop, meter: AllocatorMeter, num_batches: int) -> int:
    """Return a budget that suffices for every step at its leanest."""
    refused = run(loop, meter, 1).error
    if not isinstance(refused, BudgetTooSmallError):
        raise RuntimeError(f"{loop.name}: got {refused!r} within one byte") from refused
    least_bytes = int(_ROOM * refused.least_peak_bytes)
    if not loop.steps_differ:
        return least_bytes
    # Later steps need more than the first one, also at their leanest.
    later = run(loop, meter, least_bytes, num_batches=num_batches).handle.planned
    return max(least_bytes, *(Planner(step.profile).plan_or_leanest(1)[0].predicted_peak_bytes or 0 for step in later))


def _row(loop: Loop, name: str, budget_bytes: int, plain: Ran, within: Ran) -> Row:
    planned = within.handle.planned if within.handle is not None else []
    return Row(
        loop=loop.name,
        budget=name,
        budget_bytes=budget_bytes,
        plain_bytes=max(plain.peaks_bytes),
        peak_bytes=max(within.peaks_bytes, default=0),
        predicted_bytes=max((step.peak_bytes for step in planned), default=0),
        num_batches=len(within.peaks_bytes),
        num_recorded=len(within.handle.recorded_steps) if within.handle is not None else 0,
        slowdown=(planned[-1].plan.predicted_slowdown or 0.0) if planned else 0.0,
        weights_equal=within.digest == plain.digest,
        unsaid_overruns=within.unsaid_overruns(budget_bytes),
        overruns=within.overruns(budget_bytes),
        silent_overruns=within.silent_overruns(budget_bytes),
        said=within.said[0][1] if within.said else "",
    )
