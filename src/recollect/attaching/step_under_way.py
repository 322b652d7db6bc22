"""What has happened in the step under way, and what of it the plan in place does not foresee."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from recollect.attaching.course import Course
from recollect.attaching.entries import Backwards
from recollect.attaching.planned_step import PlannedStep
from recollect.attaching.step_shape import Call
from recollect.attaching.unit_watch import UnitWatch
from recollect.byte_format import format_bytes


@dataclass(frozen=True, slots=True)
class Departure:
    """The first thing in a step that its plan does not foresee.

    Attributes:
        text: what the step did, as in "ran layers.3 once more than planned".
        more_bytes: that the allocator's count showed beyond what was expected; None if that is not how it was seen.
    """

    text: str
    more_bytes: int | None = None

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


class StepUnderWay:
    """The calls of a step so far.

    Attributes:
        calls: of the model, in order.
        group: of them, those since nothing waited for backward.
        departure: the first thing that no plan foresaw.
        planned: the step whose plan it began with, if there is one.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.group: list[Call] = []
        self.departure: Departure | None = None
        self.planned: PlannedStep | None = None
        # Of each call: what its plan foresees, None without one; what ran in it, once it has ended; its backwards.
        self._foreseen: list[Course | None] = []
        self._ran: list[Course] = []
        self._backwards: list[Backwards] = []

    @property
    def is_first(self) -> bool:
        """Whether there is one call so far."""
        return len(self.calls) == 1

    def begin_call(self, call: Call, backwards: Backwards) -> None:
        """Note a call that is about to run."""
        if not call.is_open:
            self.group = []
        self.calls.append(call)
        self.group.append(call)
        self._backwards.append(backwards)

    def foresee(self, course: Course | None) -> None:
        """Note what the plan of the call holds for."""
        self._foreseen.append(course)

    def is_last_foreseen(self) -> bool:
        """Whether a plan foresees what the last call does."""
        return bool(self._foreseen) and self._foreseen[-1] is not None

    def end_call(self, units: UnitWatch) -> None:
        """Note what units ran in the last call, up to the next one."""
        if len(self._ran) < len(self._foreseen):
            self._ran.append(units.course())

    def courses(self) -> list[Course]:
        """Return what happened in each call; they have ended."""
        return [
            replace(ran, num_backwards=max(1, backwards.number), builds_graph=backwards.build_graph)
            for ran, backwards in zip(self._ran, self._backwards, strict=True)
        ]

    def had_more_backwards(self) -> bool:
        """Whether backward ran more often than a plan foresaw, or built a graph that it did not foresee."""
        return any(
            course is not None
            and (backwards.number > course.num_backwards or (backwards.build_graph and not course.builds_graph))
            for course, backwards in zip(self._foreseen, self._backwards, strict=True)
        )

    def beyond(self) -> list[Mapping[str, int]]:
        """Return for each call the runs of units that its plan did not foresee: all, if it had none."""
        return [(course or Course()).lacks(ran) for course, ran in zip(self._foreseen, self._ran, strict=True)]

    def skipped(self) -> dict[str, int]:
        """Return the runs of units that the plan foresaw in the calls, and that did not come."""
        found: dict[str, int] = {}
        for course, ran in zip(self._foreseen, self._ran, strict=True):
            for path, number in ({} if course is None else ran.lacks(course)).items():
                found[path] = found.get(path, 0) + number
        return found
