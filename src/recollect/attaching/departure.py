"""What a step did that the plan in place does not foresee, and what it may have needed."""

from __future__ import annotations

from dataclasses import dataclass

from recollect.attaching.planned_step import PlannedStep
from recollect.byte_format import format_bytes
from recollect.plans.paths import unit_words


@dataclass(frozen=True, slots=True)
class Departure:
    """The first thing in a step that its plan does not foresee.

    Attributes:
        text: what the step did, as in "ran layers.3 once more than planned".
        more_bytes: that the allocator's count showed beyond what was expected; None if that is not how it was seen.
    """

    text: str
    more_bytes: int | None = None

    @classmethod
    def of_unit(cls, path: str) -> Departure:
        """Return that a unit ran more often, or on more, than the plan holds for."""
        return cls(f"ran {unit_words(path)} more often than the plan foresees, or on more")

    def excess(self, planned: PlannedStep, more_bytes: int | None) -> str:
        """Return what to say of the step; "" if it needed no more than the budget.

        Args:
            planned: the step whose plan it began with.
            more_bytes: needed beyond that step's; None if that is not known.
        """
        if more_bytes is None:
            return (
                f"{self.text}, so that it may have needed more than the budget of {format_bytes(planned.budget_bytes)}"
            )
        needed = planned.peak_bytes + more_bytes
        if needed <= planned.budget_bytes:
            return ""
        return (
            f"{self.text}, so that it may have needed {format_bytes(needed)}, {format_bytes(needed - planned.budget_bytes)} "
            f"more than the budget of {format_bytes(planned.budget_bytes)}"
        )
