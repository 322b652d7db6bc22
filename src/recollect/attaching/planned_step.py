"""Recorded steps with their plans: which of them cover the current step, and their descriptions."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

from recollect.attaching.step_shape import CONTEXT, Call, covering, groups_of, other_arguments, shape_text
from recollect.attaching.timed_steps import Timing
from recollect.attaching.unit_watch import Course, Runs, largest
from recollect.byte_format import format_bytes
from recollect.notebooks import Lines
from recollect.planning.choose import CACHE_ADVICE
from recollect.plans.action import EngineChoice
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import needs_all_ranks
from recollect.profile.events import PEEK
from recollect.profile.profile import Profile, kind_text
from recollect.simulation.timeline import explain_peak
from recollect.verification.report import SLOWDOWNS

# Of two recordings of the same step, the later one may be this part of the other.
_NEARLY: Final = 0.99
_NOT_COUNTED = (
    "not counted: evaluation and generation; what other threads, processes and libraries allocate without PyTorch; "
    "on the CPU also shared memory and mapped files"
)
_UNMEASURED = (
    "not measured, for want of a step without a plan: "
    "print(recollect.verify(model, None, attached.plan, step=train_step, optimizer=optimizer)) measures it"
)
# At most this many courses are remembered for a sequence of calls, those that need most memory; others add to the
# reserve.
_MOST_COURSES: Final = 4
# Two steps are the same in all but an argument if their peaks without recompute differ by no more than this part.
_SAME_PEAK: Final = 0.005
# A string with so many values in steps whose peaks differ by no more than this part names data, as files of images do.
_MANY_NAMES: Final = 3
_NEAR_PEAK: Final = 0.05
# A plan for a step of less than this part of the elements is worth one more recording, if recompute costs more than this.
_MUCH_SMALLER: Final = 0.5
_WORTH_SLOWDOWN: Final = 0.01
_MOST_PLANS: Final = 16
_Key = tuple[str, tuple[object, ...]]


@dataclass
class PlannedStep:
    """A recorded step with its plan."""

    calls: list[Call]
    """Of the model, in order: those of the step."""
    profile: Profile
    plan: Plan
    budget_bytes: int
    plain_peak_bytes: int
    """Predicted peak without recompute."""
    full_slowdown: float
    """Predicted slowdown of full recompute."""
    number: int
    """Number of steps recorded before it; the same in all processes."""
    worst_slowdown: float
    """Predicted slowdown under the plan in the process where it is largest."""
    courses: list[Course] = field(default_factory=list)
    spare: list[Mapping[str, int]] = field(default_factory=list)
    """For each call, further runs of units for which memory is reserved; they run at their leanest."""
    more_bytes: int = 0
    """Bytes reserved for memory that other steps held for unknown reasons."""
    state_bytes: int = 0
    """Bytes of state that the optimizers had when it was planned."""
    made: frozenset[int] = frozenset()
    """Positions of the parameters that backward made gradients for."""
    unlike: str = ""
    """How it differs from an earlier step with the same calls, in words; "" if there is none."""
    measured_bytes: int = 0
    """The highest measured peak of a step under the plan; 0 if none was measured."""
    num_calls: int = 0
    """Of the model that ran under the plan."""
    timing: Timing = field(default_factory=Timing)
    """Measured times of steps under the plan."""
    is_corrected: bool = False
    """It was planned again with such times."""
    held: dict[tuple[int, Call], deque[int]] = field(default_factory=dict)
    """The last readings of the allocator for each call under the plan; this and what follows is for `CallWatch`."""
    held_before: int = 0
    """The fewest bytes of tensors before a step under the plan, as foreseen or counted."""
    begin_bytes: int = 0
    """Bytes of tensors that should be in memory when it begins."""
    most_held_bytes: int | None = None
    """Bytes of tensors that its only call should hold when it returns; None if it has several."""

    @property
    def work_bytes(self) -> int:
        """Peak without recompute minus the bytes that are always alive."""
        return self.plain_peak_bytes - self.profile.persistent_bytes

    @property
    def peak_bytes(self) -> int:
        return self.plan.predicted_peak_bytes or 0

    @property
    def needs_all_ranks(self) -> bool:
        """Whether other processes could deadlock, waiting for one that runs a different plan."""
        return needs_all_ranks(self.plan.units)

    @property
    def is_compiling(self) -> bool:
        """Whether its next call compiles, which takes memory of the same allocator as tensors on a CPU."""
        return self.plan.is_compiled and self.num_calls <= 1 and not self.profile.device.startswith("cuda")

    @cached_property
    def is_timeable(self) -> bool:
        """Whether anything runs again, and the tape runs all of it: it can then be told from the rest of backward."""
        units = [unit for unit in self.plan.units.values() if unit.recomputes_anything]
        return bool(units) and all(unit.engine is EngineChoice.TAPE for unit in units)

    @cached_property
    def halves_reach_output(self) -> bool:
        """Whether both halves of a backward may reach an output: the second one begins at traces, or at a layer's last op."""
        return any(True for _ in self.profile.log.operands(PEEK))

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.budget_bytes

    def __str__(self) -> str:
        """Describe its calls: "2 calls of 8 x 256 and 4 x 128"."""
        counts = Counter(map(str, self.calls))
        calls = " and ".join(f"{number} calls of {call}" if number > 1 else call for call, number in counts.items())
        return f"{calls} (unlike {self.unlike})" if self.unlike else calls

    @property
    def slowdown_text(self) -> str:
        """The predicted slowdown, its range, and the source of the times if they were not measured."""
        times = self.profile.times_text
        return f"{self.plan.predicted_slowdown or 0.0:+.1%}{self.plan.range_text}{f' by {times}' if times else ''}"

    def line(self, seconds: float, again: str = "") -> str:
        """Return the line that describes the plan, how long planning took, and why it was done `again`."""
        host_bytes = self.plan.predicted_host_bytes
        host = f"host memory {format_bytes(host_bytes)}, " if host_bytes else ""
        return (
            f"recollect: {format_bytes(self.budget_bytes)} budget, predicted peak {format_bytes(self.peak_bytes)}, {host}"
            f"step {self.slowdown_text}, full recompute {self.full_slowdown:+.0%}, "
            f"planned {'again ' if again else ''}for {self}{again} in {seconds:.1f} s"
        )

    def numbers(self) -> dict[str, float]:
        """Return the numbers of these lines, under names for the loggers of trainers."""
        found = {
            "memory_budget_bytes": self.budget_bytes,
            "predicted_peak_bytes": self.peak_bytes,
            "predicted_slowdown": self.plan.predicted_slowdown or 0.0,
        }
        if self.measured_bytes:
            over_bytes = max(0, self.measured_bytes - self.budget_bytes)
            found |= {"measured_peak_bytes": self.measured_bytes, "over_budget_bytes": over_bytes}
        if self.timing.found is not None:
            found["measured_slowdown"] = self.timing.found.slowdown
        return found

    def measured_text(self) -> str:
        if not self.measured_bytes:
            return "not measured" + (
                ", which on a CPU measure=True asks for" if self.profile.device == "cpu" else " yet"
            )
        over_bytes = self.measured_bytes - self.budget_bytes
        held = f"over the budget by {format_bytes(over_bytes)}" if over_bytes > 0 else "held"
        return f"measured peak {format_bytes(self.measured_bytes)}: {held}"

    def measured_line(self) -> str:
        return (
            f"recollect: {format_bytes(self.budget_bytes)} budget, predicted peak {format_bytes(self.peak_bytes)}, "
            f"{self.measured_text()}, for {self}"
        )

    def follows(self, calls: Sequence[Call]) -> bool:
        """Whether the step begins with calls like these, each at least as large."""
        return len(calls) <= len(self.calls) and all(
            known.is_at_least(call) for known, call in zip(self.calls, calls, strict=False)
        )

    def foreseen(self, calls: Sequence[Call]) -> tuple[Course, Mapping[str, int]] | None:
        """Return the course of the last of these calls that the plan covers, and the further unit runs it has memory for.

        None if it does not cover the calls.
        """
        found = [len(calls) - 1] if self.follows(calls) else covering(self.calls, calls)
        if not found:
            return None
        if len(found) == 1:
            return self.courses[found[0]], self.spare[found[0]]
        # Of several calls, take each unit's largest number of runs.
        most: dict[str, int] = {}
        for index in found:
            for path, number in self.spare[index].items():
                most[path] = max(most.get(path, 0), number)
        return largest(self.courses[index] for index in found), most

    def replaces(self, other: PlannedStep) -> bool:
        """Whether this step has exactly the calls of the other, recorded later, and at least the same work in them."""
        is_alike = self.calls == other.calls and all(map(Course.is_at_least, self.courses, other.courses))
        return is_alike and self.work_bytes >= _NEARLY * other.work_bytes

    def hides(self, other: PlannedStep) -> bool:
        """Whether the other begins with the same calls and is smaller: only its end may tell which it is."""
        num_common = min(len(self.calls), len(other.calls))
        is_alike = self.calls[:num_common] == other.calls[:num_common] and len(self.calls) >= len(other.calls)
        mine, its = groups_of(self.calls)[0], groups_of(other.calls)[0]
        is_alike |= len(mine) > len(its) and mine[: len(its)] == its
        return is_alike and (self.work_bytes, self.number) > (other.work_bytes, other.number)


def report_of(
    planned: Sequence[PlannedStep], budget_bytes: int | None, num_steps: int, recorded_steps: Sequence[int]
) -> Lines:
    if budget_bytes is None:
        return Lines("recollect: no step was recorded yet; the first one ends with the optimizer's step")
    lines = [f"{format_bytes(budget_bytes)} budget, {num_steps} steps, {len(recorded_steps)} of them recorded"]
    for step in planned:
        lines.append(
            f"{step}, as in step {recorded_steps[step.number]}: predicted peak {format_bytes(step.peak_bytes)} "
            f"({format_bytes(step.plain_peak_bytes)} without recompute), {step.slowdown_text}; {step.measured_text()}"
        )
    last = planned[-1]
    lines.append(f"slowdown {SLOWDOWNS.get(last.plan) or last.timing.found or _UNMEASURED}")
    lines += filter(None, (CACHE_ADVICE if last.profile.makes_cache else "", last.plan.note))
    counted = ", ".join(f"{kind_text(kind)} {format_bytes(n)}" for kind, n in last.profile.persistent.items() if n)
    peak = explain_peak(last.profile, last.plan)
    filled = f"fullest in {peak.where}: {', '.join(peak.tenants())}"
    return Lines("\n".join([*lines, filled, f"counted throughout: {counted}", _NOT_COUNTED]))


class PlannedSteps:
    """The knowledge of the steps so far.

    Attributes:
        steps: the steps that have plans, in the order in which they were recorded.
        seen: the units seen in the calls of each module, each as often as in any call of any shapes.
    """

    def __init__(self) -> None:
        self.steps: list[PlannedStep] = []
        self.seen: dict[_Key, Course] = {}
        self._ignored: set[tuple[str, int]] = set()
        self._ends_vary = False  # What waits for backward together differs from step to step.

    def as_known(self, call: Call) -> Call:
        """Return a call without the arguments that have proved to change nothing."""
        if not self._ignored:
            return call
        known = tuple(
            None if (call.entry, position) in self._ignored else argument
            for position, argument in enumerate(call.arguments)
        )
        return replace(call, arguments=known)

    def covering(self, calls: Sequence[Call], active: PlannedStep | None) -> list[PlannedStep]:
        """Return the steps that cover the calls so far; of those that only differ at the end, the largest.

        Only the active one, where earlier calls wait for backward: they hold what it says, beside which others have no room.
        """
        found = [step for step in self.steps if step.follows(calls) or covering(step.calls, calls)]
        if active is not None and len(groups_of(calls)[-1]) > 1:
            return [active] if active in found else []
        found = [step for step in found if not any(other.hides(step) for other in found)]
        if not (self._ends_vary and found):
            return found
        return [max(found, key=lambda step: (len(groups_of(step.calls)[0]), step.work_bytes))]

    def note_other_end(self, calls: Sequence[Call]) -> None:
        """Note that no step covers the last call: from now on prefer large steps, if it waits for backward with others."""
        self._ends_vary |= len(groups_of(calls)[-1]) > 1

    def choice(
        self, calls: Sequence[Call], active: PlannedStep | None, may_record: Callable[[], bool]
    ) -> PlannedStep | None:
        """Return the fastest step that covers the calls so far; None if there is none, or one is worth recording."""
        is_first = len(calls) == 1
        if not is_first and active is not None and active.follows(calls):
            return active  # The order of calls is the recorded one, so the open calls are known from there.
        candidates = self.covering(calls, active)
        if not candidates:
            self.note_other_end(calls)
            return None
        best = min(candidates, key=lambda step: step.calls[0].numel)
        if not is_first:
            return best
        fitting = [step for step in candidates if step.follows(calls)]
        # Among equally large ones, take the one with more calls: the rest of this step is not known yet.
        best = min(fitting, key=lambda step: (step.calls[0].numel, -len(step.calls)), default=best)
        slowdown = best.plan.predicted_slowdown or 0.0
        is_worth_it = calls[0].numel < _MUCH_SMALLER * best.calls[0].numel and slowdown > _WORTH_SLOWDOWN
        return None if is_worth_it and len(self.steps) < _MOST_PLANS and may_record() else best

    def add(self, planned: PlannedStep) -> None:
        """Add a step; forget steps that it makes superfluous, and the smallest one if there are too many courses."""
        self.steps = [step for step in self.steps if not planned.replaces(step)]
        self.steps.append(planned)
        alike = [step for step in self.steps if step.calls == planned.calls]
        if len(alike) > _MOST_COURSES:
            self.steps.remove(min(alike, key=lambda step: (step.plain_peak_bytes, step.number)))
        self._learn_arguments(planned)

    def note(self, calls: Sequence[Call], courses: Sequence[Course]) -> None:
        for call, course in zip(calls, courses, strict=True):
            # Sizes of their inputs follow from shapes, which differ between steps and processes.
            runs = Course({path: Runs(its.number, 0) for path, its in course.units.items()})
            self.note_seen({(call.entry, call.context): runs})

    def note_seen(self, others: Mapping[_Key, Course]) -> None:
        """Note the course of each module's calls, here or in other processes."""
        for key, course in others.items():
            self.seen[key] = largest([self.seen.get(key, Course()), course])

    def spare(self, calls: Sequence[Call], courses: Sequence[Course]) -> list[Mapping[str, int]]:
        """Return for each call of a step the runs of units that others like it had, and it had not."""
        return [
            course.lacks(self.seen.get((call.entry, call.context), course))
            for call, course in zip(calls, courses, strict=True)
        ]

    def _learn_arguments(self, planned: PlannedStep) -> None:
        """Ignore arguments that differ between two steps with the same course and the same peak, and strings that name data."""
        names: defaultdict[tuple[str, int], set[object]] = defaultdict(set)
        for step in self.steps:
            if [course.without_sizes for course in step.courses] != [one.without_sizes for one in planned.courses]:
                continue
            calls, its_calls = ([replace(c, arguments=()) for c in made.calls] for made in (step, planned))
            off = abs(step.plain_peak_bytes / planned.plain_peak_bytes - 1)
            is_same = off <= _SAME_PEAK and calls == its_calls and step.courses == planned.courses
            for place, values in other_arguments(step.calls, planned.calls):
                if is_same:
                    self._ignored.add(place)
                elif off <= _NEAR_PEAK and all(type(value) is str for value in values):
                    names[place].update(values)
        self._ignored |= {place for place, found in names.items() if len(found) >= _MANY_NAMES}
        for step in self.steps:
            step.calls = [self.as_known(call) for call in step.calls]
        self.steps = [step for step in self.steps if step is planned or not planned.replaces(step)]


def grouped(calls: Sequence[Call], spare: Sequence[Mapping[str, int]]) -> list[Mapping[str, int]]:
    """Add up the spare runs of calls that may wait for backward at the same time."""
    found: list[Mapping[str, int]] = []
    position = 0
    for group in groups_of(calls):
        total: Counter[str] = Counter()
        for its in spare[position : position + len(group)]:
            total.update(its)
        found.append(total)
        position += len(group)
    return found


def difference(one: PlannedStep, other: PlannedStep) -> str:
    """Return how two recorded steps differ, in words; "" if they do not, as where one was recorded again."""
    for mine, its in zip(one.calls, other.calls, strict=False):
        if text := _unlike(mine, its):
            return text
    if len(one.calls) != len(other.calls):
        return "the number of calls"
    more_bytes = other.profile.persistent_bytes - one.profile.persistent_bytes
    if more_bytes and [mine.units.keys() for mine in one.courses] == [its.units.keys() for its in other.courses]:
        return f"{format_bytes(abs(more_bytes))} {'more' if more_bytes > 0 else 'less'} that live through it"
    return "" if one.courses == other.courses else "what runs in it"


def _unlike(mine: Call, its: Call) -> str:
    """Return how two calls differ, in words; "" if they do not."""
    if mine.entry != its.entry:
        return f"the module that is called, {mine.entry or 'the model'} and {its.entry or 'the model'}"
    if mine.shapes != its.shapes:
        pairs = zip(mine.shapes, its.shapes, strict=False)
        other_shapes = (f"shapes {shape_text(a)} and {shape_text(b)}" for a, b in pairs if a != b)
        return next(other_shapes, "the number of tensors")
    for name, one, other in zip(CONTEXT, mine.context, its.context, strict=False):
        if one != other:
            return name if name == CONTEXT[-1] else f"{name} {one} and {other}"
    if mine.arguments != its.arguments:
        changed = [pair for pair in zip(mine.arguments, its.arguments, strict=False) if pair[0] != pair[1]]
        return "arguments " + (", ".join(f"{a!r} and {b!r}" for a, b in changed[:3]) or "that one of them lacks")
    if (mine.trained, mine.traced) != (its.trained, its.traced):
        return "what requires a gradient"
    if mine.is_open != its.is_open:
        return "whether an earlier call waits for its backward"
    return "" if mine.has_gradients == its.has_gradients else "gradients that are there before it"


def unforeseen(planned: PlannedStep, calls: Sequence[Call]) -> str:
    index = next((i for i in range(len(calls)) if planned.foreseen(calls[: i + 1]) is None), len(calls) - 1)
    if index >= len(planned.calls):
        return f"called the model {len(calls)} times, and its plan foresees {len(planned.calls)}"
    known, call = planned.calls[index], calls[index]
    return f"differs in call {index + 1} of the model from its plan: {_unlike(known, call) or 'its place in the step'}"
