"""What no plan covered when it came too late to record it: the next steps are recorded until one covers it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from recollect.attaching.course import Course
from recollect.attaching.planned_step import PlannedStep
from recollect.attaching.step_shape import Call

# Where steps alternate, a few begin like the one that was missed.
_MOST_ATTEMPTS: Final = 4
# With so many runs of units at their leanest, in a step that has memory reserved for them, a larger one is worth recording.
_MOST_SPARE: Final = 0.1


class Missed:
    """A step, or the beginning of one, that ran without a plan for it.

    Attributes:
        attempts_left: how many more steps are recorded at most.
        did_more: at equal shapes, so that what is lean for the recorded steps may not be lean for it.
        was_over: it may have been over the budget.
    """

    def __init__(self) -> None:
        self.attempts_left = 0
        self.did_more = self.was_over = False
        self._calls: list[Call] = []
        self._courses: list[Course] = []

    def note(
        self,
        calls: Sequence[Call],
        courses: Sequence[Course] = (),
        *,
        attempts: int | None = None,
        did_more: bool = False,
        was_over: bool = False,
    ) -> None:
        """Note one.

        Args:
            calls: of the model, so far.
            courses: what happened in them, where that is known.
            attempts: how many steps to record for it, if not the usual number.
            did_more: see the class.
            was_over: see the class.
        """
        self._calls, self._courses = list(calls), list(courses)
        self.attempts_left = _MOST_ATTEMPTS if attempts is None else attempts
        self.did_more, self.was_over = did_more, was_over

    def is_met_by(self, planned: PlannedStep) -> bool:
        """Return whether a step that was recorded since covers it, without running much of it at its leanest."""
        if not planned.follows(self._calls):
            return False
        for wanted, course, spare in zip(self._courses, planned.courses, planned.spare, strict=False):
            lacking = course.lacks(wanted)
            if any(spare.get(path, 0) < number for path, number in lacking.items()):
                return False
            if wanted.num_backwards > course.num_backwards or (wanted.builds_graph and not course.builds_graph):
                return False
        return is_little(planned.courses, planned.spare)

    def end_attempt(self, *, is_met: bool) -> None:
        """Note that a step was recorded for it."""
        self.attempts_left = 0 if is_met else max(0, self.attempts_left - 1)
        self.did_more &= self.attempts_left > 0
        self.was_over &= self.attempts_left > 0


def is_little(courses: Sequence[Course], spare: Sequence[Mapping[str, int]]) -> bool:
    """Whether in each call only a few runs of units are spare, beside those that are planned."""
    return all(sum(its.values()) <= _MOST_SPARE * course.num_runs for course, its in zip(courses, spare, strict=True))
