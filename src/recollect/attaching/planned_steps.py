"""The steps that `attach` has planned: which of them cover the step under way, and what else was seen of steps like them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from recollect.attaching.course import Course, Runs, largest
from recollect.attaching.planned_step import PlannedStep
from recollect.attaching.step_shape import Call, covering, groups_of

# Of one sequence of calls, so many courses are remembered, those that need the most memory;
# the others count in what is reserved.
_MOST_COURSES: Final = 4
# Two steps are the same in all but an argument if their peaks without recompute differ by no more than this part.
_SAME_PEAK: Final = 0.005

# A plan for a step of less than this part of the elements is worth one more recording, if recompute costs more than this.
_MUCH_SMALLER: Final = 0.5
_WORTH_SLOWDOWN: Final = 0.01
_MOST_PLANS: Final = 16

_Key = tuple[str, tuple[object, ...]]


class PlannedSteps:
    """What is known of the steps so far.

    Attributes:
        steps: that have plans, in the order in which they were recorded.
        seen: what was seen in the calls of each module, each unit as often as in any, whatever its shapes.
    """

    def __init__(self) -> None:
        self.steps: list[PlannedStep] = []
        self.seen: dict[_Key, Course] = {}
        self._ignored: set[tuple[str, int]] = set()

    def as_known(self, call: Call) -> Call:
        """Return a call without the arguments that were seen to change nothing."""
        if not self._ignored:
            return call
        known = tuple(
            None if (call.entry, position) in self._ignored else argument
            for position, argument in enumerate(call.arguments)
        )
        return replace(call, arguments=known)

    def covering(self, calls: Sequence[Call], group: Sequence[Call]) -> list[PlannedStep]:
        """Return the steps that cover the calls so far; of those that only their end tells apart, the largest.

        Args:
            calls: of this step.
            group: of them, those since nothing waited for backward.
        """
        found = [step for step in self.steps if step.follows(calls) or covering(step.calls, group)]
        return [step for step in found if not any(other.hides(step) for other in found)]

    def choice(
        self,
        calls: Sequence[Call],
        group: Sequence[Call],
        active: PlannedStep | None,
        may_record: Callable[[], bool],
    ) -> PlannedStep | None:
        """Return the fastest step that covers the calls so far; None if there is none, or one is worth recording.

        Args:
            calls: of this step.
            group: of them, those since nothing waited for backward.
            active: the step whose plan is in place.
            may_record: whether this step can be recorded, where a much smaller one would be worth it.
        """
        is_first = len(calls) == 1
        if not is_first and active is not None and active.follows(calls):
            return active  # The order of calls is the recorded one, so what is open is known from there.
        candidates = self.covering(calls, group)
        if not candidates:
            return None
        if len(group) > 1 and active in candidates:
            return active
        best = min(candidates, key=lambda step: step.calls[0].numel)
        if not is_first:
            return best
        fitting = [step for step in candidates if step.follows(calls)]
        # Of equally large ones, that with more calls: what comes in this step is not known yet.
        best = min(fitting, key=lambda step: (step.calls[0].numel, -len(step.calls)), default=best)
        slowdown = best.plan.predicted_slowdown or 0.0
        is_worth_it = calls[0].numel < _MUCH_SMALLER * best.calls[0].numel and slowdown > _WORTH_SLOWDOWN
        return None if is_worth_it and len(self.steps) < _MOST_PLANS and may_record() else best

    def add(self, planned: PlannedStep) -> None:
        """Add a step; forget those that it makes superfluous, and the smallest if there are too many courses."""
        self.steps = [step for step in self.steps if not planned.replaces(step)]
        self.steps.append(planned)
        alike = sorted(
            (step for step in self.steps if step.calls == planned.calls),
            key=lambda step: (step.plain_peak_bytes, step.number),
        )
        if len(alike) > _MOST_COURSES:
            self.steps.remove(alike[0])
        self._learn_arguments(planned)

    def note(self, calls: Sequence[Call], courses: Sequence[Course]) -> None:
        """Note what happened in the calls of a step."""
        for call, course in zip(calls, courses, strict=True):
            key = call.entry, call.context
            # On how much they ran is for the shapes to say, which differ from step to step and from process to process.
            runs = Course({path: Runs(its.number, 0) for path, its in course.units.items()})
            self.note_seen({key: runs})

    def note_seen(self, others: Mapping[_Key, Course]) -> None:
        """Note what was seen in the calls of each module, here or in other processes."""
        for key, course in others.items():
            self.seen[key] = largest([self.seen.get(key, Course()), course])

    def spare(self, calls: Sequence[Call], courses: Sequence[Course]) -> list[Mapping[str, int]]:
        """Return for each call of a step the runs of units that others like it had, and it had not."""
        return [
            course.lacks(self.seen.get((call.entry, call.context), course))
            for call, course in zip(calls, courses, strict=True)
        ]

    def _learn_arguments(self, planned: PlannedStep) -> None:
        """Ignore arguments in which a step differs from another one that took the same course and needed as much."""
        for step in self.steps:
            is_same = (
                step.calls != planned.calls
                and [replace(c, arguments=()) for c in step.calls] == [replace(c, arguments=()) for c in planned.calls]
                and step.courses == planned.courses
                and abs(step.plain_peak_bytes - planned.plain_peak_bytes) <= _SAME_PEAK * planned.plain_peak_bytes
            )
            if not is_same:
                continue
            for one, other in zip(step.calls, planned.calls, strict=True):
                if len(one.arguments) == len(other.arguments):
                    pairs = enumerate(zip(one.arguments, other.arguments, strict=True))
                    self._ignored |= {(one.entry, position) for position, (mine, its) in pairs if mine != its}
        for step in self.steps:
            step.calls = [self.as_known(call) for call in step.calls]
        self.steps = [step for step in self.steps if step is planned or not planned.replaces(step)]


def grouped(calls: Sequence[Call], spare: Sequence[Mapping[str, int]]) -> list[Mapping[str, int]]:
    """Add up what is spare in the calls that may wait for backward at once."""
    found: list[Mapping[str, int]] = []
    position = 0
    for group in groups_of(calls):
        total: dict[str, int] = {}
        for its in spare[position : position + len(group)]:
            for path, number in its.items():
                total[path] = total.get(path, 0) + number
        found.append(total)
        position += len(group)
    return found


def difference(steps: Sequence[PlannedStep]) -> str:
    """Return in words what sets the last step apart from the one before it."""
    if len(steps) < 2:
        return "its course"
    one, other = steps[-2:]
    for mine, its in zip(one.calls, other.calls, strict=False):
        if mine.shapes != its.shapes:
            return f"shapes {mine} and {its}"
        if mine.context != its.context:
            return "how the model is built, or its mode"
        if mine.arguments != its.arguments:
            changed = [pair for pair in zip(mine.arguments, its.arguments, strict=False) if pair[0] != pair[1]]
            return "arguments " + ", ".join(f"{a!r} and {b!r}" for a, b in changed[:3])
    return "the units that run" if len(one.calls) == len(other.calls) else "the number of calls"
