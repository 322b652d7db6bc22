"""`Missed`: a step that ran without a plan for it, and how many steps are recorded to find one."""

from collections.abc import Mapping, Sequence
from typing import Final

from recollect.attaching.planned_step import PlannedStep
from recollect.attaching.step_shape import Call
from recollect.attaching.unit_watch import Course
from recollect.programs.cut import OTHER_OPS

# Where steps alternate, a few begin like the uncovered one.
_MOST_ATTEMPTS: Final = 4
# With this many unit runs at their leanest, in reserved memory, a larger step is worth recording.
_MOST_SPARE: Final = 0.1


class Missed:
    """A step, or the beginning of one, that ran without a plan for it.

    Attributes:
        attempts_left: how many more steps are recorded at most.
        did_more: it did more at equal shapes, and the lean plan of recorded steps may not be lean for it.
        was_over: it may have been over the budget.
    """

    def __init__(self) -> None:
        self.attempts_left = 0
        self.did_more = self.was_over = False
        self._calls: list[Call] = []
        self._courses: list[Course] = []
        self._unnamed: tuple[str, str] | None = None

    def note(
        self,
        calls: Sequence[Call],
        courses: Sequence[Course] = (),
        *,
        attempts: int | None = None,
        did_more: bool = False,
        was_over: bool = False,
        unnamed: tuple[str, str] | None = None,
    ) -> None:
        """Note one: its calls so far, their courses where known, and how many steps to record, if not the usual number.

        `unnamed`: a unit, and a value in it.
        """
        self._calls, self._courses = list(calls), list(courses)
        self.attempts_left = _MOST_ATTEMPTS if attempts is None else attempts
        self.did_more, self.was_over = did_more, was_over
        self._unnamed = unnamed

    def is_met_by(self, planned: PlannedStep) -> bool:
        """Return whether a step that was recorded since covers it, without running much of it at its leanest."""
        if not planned.follows(self._calls) or (self._unnamed and not planned.profile.has_value(*self._unnamed)):
            return False
        for wanted, course, spare in zip(self._courses, planned.courses, planned.spare, strict=False):
            lacking = course.lacks(wanted)
            if any(spare.get(path, 0) < number for path, number in lacking.items()):
                return False
            if not course.foresees_backward(wanted):
                return False
        return is_little(planned.courses, planned.spare)

    def note_untraced(self, planned: PlannedStep, others: list[PlannedStep]) -> None:
        """Have the second step recorded if layers ran ops that their traces lack: they may make tables in their first call.

        A step without such ops takes the place of one that made them, though it does less.
        """
        if _runs_other_ops(planned):
            if not planned.number:
                self.note([], attempts=1)
            return
        others[:] = [
            one
            for one in others
            if one.calls != planned.calls
            or not all(map(Course.is_at_least, planned.courses, one.courses))
            or not _runs_other_ops(one)
        ]

    def end_attempt(self, *, is_met: bool) -> None:
        self.attempts_left = 0 if is_met else max(0, self.attempts_left - 1)
        self.did_more &= self.attempts_left > 0
        self.was_over &= self.attempts_left > 0


def _runs_other_ops(planned: PlannedStep) -> bool:
    return any(graph.why_not_traced.startswith(OTHER_OPS) for graph in planned.profile.graphs)


def is_little(courses: Sequence[Course], spare: Sequence[Mapping[str, int]]) -> bool:
    """Whether each call has only a few spare unit runs besides the planned ones."""
    return all(sum(its.values()) <= _MOST_SPARE * course.num_runs for course, its in zip(courses, spare, strict=True))
