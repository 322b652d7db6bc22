"""The course of the running step, and where it departs from the plan in place.

Each call of the model is compared with that plan: the runs of its units, and the bytes that it held before under the plan.
"""

import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import torch

from recollect._torch_dtensor import local_part
from recollect._torch_parallel import has_process_group
from recollect._torch_private import is_capturing, next_autograd_node
from recollect.attaching.placement import Backwards, Memory, Placement, State, made_in
from recollect.attaching.planned_step import PlannedStep
from recollect.attaching.step_shape import Call, Structure
from recollect.attaching.unit_watch import Course, UnitWatch
from recollect.byte_format import format_bytes
from recollect.engine.graph.graph_engine import GraphForward
from recollect.engine.tape import forget_last_step
from recollect.measuring.device_memory import held_now, tensor_bytes
from recollect.measuring.meter import storage_bytes
from recollect.profile.events import BACKWARD, PHASE, RETURN
from recollect.recording.step_recording import StepRecording
from recollect.simulation.timeline import timeline

# Allowance for other threads and for objects other than tensors: within a call, and from step to step.
_NOISE_BYTES: Final = 96 * 1024
_GROWTH_BYTES: Final = 1 << 20
# Memory allocated in a plan's first runs that stays: Python's, caches of libraries. On a CPU the nodes of autograd's graph are
# in it, too: 0.65 to 0.85 KiB each, with what they save by, which is more than that where there are thousands of small ops.
_OWN_BYTES: Final = 512 * 1024
_NODE_BYTES: Final = 1024
# PyTorch's record of the last 2,000 collectives doubles as it fills, and takes 1 MiB in the end.
_COLLECTIVES_BYTES: Final = 512 * 1024
_MOST_READINGS: Final = 3
# Other libraries' threads, such as gloo's, release buffers slightly later: read again before reporting more memory.
_READ_AGAIN: Final = 10
_PAUSE_S: Final = 0.002
# The share of time that reading the allocator may take: glibc walks all free memory; and that counting tensors may take.
_PRICE: Final = 0.001
_COUNT_PRICE: Final = 0.01
# Read and count at any cost the first times, then read once in this many calls.
_ALWAYS_READ: Final = 6
_READ_EVERY: Final = 4

OnLarger: TypeAlias = Literal["replan", "warn", "raise"]


@dataclass(frozen=True, slots=True)
class Departure:
    """The first thing in a step that its plan does not foresee."""

    text: str
    """The departure, as in "ran layers.3 once more than planned"."""
    more_bytes: int | None = None
    """Bytes beyond those expected by the allocator's count; 0 if values seem to have others' names; else None."""
    unnamed: tuple[str, str] | None = None
    """The value that no plan names, and before it its unit, which is foreseen."""
    is_understood: bool = False
    """A recorded step would not show more."""

    @property
    def is_of_names(self) -> bool:
        """Whether values have names that the plan does not know, or means for others."""
        return self.unnamed is not None or self.more_bytes == 0

    def excess(self, planned: PlannedStep, more_bytes: int | None, measured_bytes: int) -> str:
        """Return the message about the step; "" if it needed no more than the budget.

        What it needed is `more_bytes` more than planned, None if unknown, or `measured_bytes`, 0 if that was not measured.
        """
        budget = f"the budget of {format_bytes(planned.budget_bytes)}"
        if more_bytes is None and not measured_bytes:
            return f"{self.text}. It may have needed more than {budget}"
        needed = measured_bytes or planned.peak_bytes + (more_bytes or 0)
        if needed <= planned.budget_bytes:
            return ""
        over = f"{format_bytes(needed)}, {format_bytes(needed - planned.budget_bytes)} more than {budget}"
        if measured_bytes:
            return f"{self.text}. Its measured peak was {over}"
        return f"{self.text}. It may have needed {over}, and yet more if it did more than call the model"


class StepUnderWay:
    """The calls of a step so far.

    Attributes:
        calls: of the model, in order.
        departure: the first thing that no plan foresaw.
        planned: the step whose plan it began with, if there is one.
        state, recording: what is in place, and the recorder if that is it.
        made: positions of the parameters that have gradients when the last optimizer has stepped.
        in_compiled: the recorder began within compiled code that calls the model.
        returned, before: what the model returned in it, and in the step before.
    """

    def __init__(self, before: Memory | None = None) -> None:
        self.returned, self.before = Memory(), before or Memory()
        self.calls: list[Call] = []
        self.departure: Departure | None = None
        self.planned: PlannedStep | None = None
        self.state = State.IDLE
        self.made = frozenset[int]()
        self.recording: StepRecording | None = None
        self.in_compiled = False
        # For each call: the course its plan foresees, None without one; its own course, once ended; its backwards.
        self._foreseen: list[Course | None] = []
        self._ran: list[Course] = []
        self._backwards: list[Backwards] = []

    @property
    def is_first(self) -> bool:
        return len(self.calls) == 1

    def begin_call(self, call: Call, backwards: Backwards) -> None:
        self.calls.append(call)
        backwards.before = self.before
        self._backwards.append(backwards)

    def foresee(self, course: Course | None) -> None:
        self._foreseen.append(course)

    def waits_for_backward(self) -> bool:
        """Whether the graph of a call is there, and what backward has yet to use."""
        # After a backward, it may still be (a gradient penalty), which only the recorder knows.
        recording = self.recording if self.calls else None
        is_open = recording is not None and recording.recorder.event_log.has_open_needs
        return is_open or any(backwards.is_awaited for backwards in self._backwards)

    def ran_backward_within(self) -> bool:
        """Whether the last call, which ends now, had a backward inside: a force, or a penalty on inputs."""
        return self._backwards[-1].number > 0

    @property
    def beside_bytes(self) -> int:
        """Bytes of what the model returned in the step before that were in memory when all its successors were there."""
        return self._backwards[-1].beside_bytes if self._backwards else 0

    def is_last_foreseen(self) -> bool:
        """Whether a plan foresees the work of the last call."""
        return bool(self._foreseen) and self._foreseen[-1] is not None

    def are_all_foreseen(self) -> bool:
        """Whether a plan foresees the work of each call, if not of each unit."""
        return None not in self._foreseen

    def end_call(self, units: UnitWatch) -> None:
        """Note the units that ran in the last call, up to the next one."""
        if len(self._ran) < len(self._foreseen):
            self._ran.append(units.course())

    def courses(self) -> list[Course]:
        return [
            replace(ran, num_backwards=max(1, backwards.number), builds_graph=backwards.build_graph)
            for ran, backwards in zip(self._ran, self._backwards, strict=True)
        ]

    def had_more_backwards(self, planned: PlannedStep) -> bool:
        """Whether backward ran more often than a plan foresaw, or built a graph that it did not foresee."""
        times = 2 if planned.halves_reach_output else 1
        pairs = ((c, ran) for c, ran in zip(self._foreseen, self.courses(), strict=True) if c is not None)
        return any(not replace(c, num_backwards=times * c.num_backwards).foresees_backward(ran) for c, ran in pairs)

    def beyond(self) -> list[Mapping[str, int]]:
        """Return for each call the runs of units that its plan did not foresee: all, if it had none."""
        return [(course or Course()).lacks(ran) for course, ran in zip(self._foreseen, self._ran, strict=True)]

    def alone_without_plan(self) -> list[tuple[Call, Course]]:
        """Return the calls without a plan; [] if one waited for backward with others, or others did more than planned."""
        is_open = [*(call.is_open for call in self.calls[1:]), False]
        calls = list(zip(self.calls, is_open, self._foreseen, self._ran, strict=True))
        if any(call.is_open or following if c is None else c.lacks(ran) for call, following, c, ran in calls):
            return []
        return [(call, ran) for call, _, course, ran in calls if course is None]

    def skipped(self) -> dict[str, int]:
        """Return the unit runs that the plan foresaw but that did not happen: within calls, and in one that others replaced."""
        found: Counter[str] = Counter()
        for course, ran in zip(self._foreseen, self._ran, strict=True):
            found.update({} if course is None else ran.lacks(course))
        # Nothing waits for backward where an unforeseen group of calls begins; only the largest such group counts as more.
        others = (at for at, course in enumerate(self._foreseen) if course is None and not self.calls[at].is_open)
        if self.planned is not None and (other := next(others, None)) is not None:
            found.update(Course().lacks(self.planned.courses[min(other, len(self.planned.courses) - 1)]))
        return found


def departure_at_end(step: StepUnderWay, planned: PlannedStep, structure: Structure) -> Departure | None:
    """Return the departure of a step that ran backward more often, or for which its plan has no room.

    A plan takes it that what the model returned is replaced when it returns again, not when a function of the loop does.
    """
    if step.had_more_backwards(planned):
        return Departure("ran backward more often than the plan foresees, or for a graph of its own")
    further = [structure.parameters[at].grad for at in step.made - planned.made]
    nbytes = storage_bytes(gradient for gradient in further if gradient is not None)
    lacking = planned.made - step.made
    if step.skipped():  # Steps may take one branch or the other; else gradients may be there earlier than others were.
        nbytes -= sum(local_part(structure.parameters[at]).nbytes for at in lacking)
    if nbytes > 0 and planned.peak_bytes + nbytes > planned.budget_bytes:
        text = f"made {len(further)} gradients that its plan does not foresee"
        return Departure(text, nbytes, is_understood=bool(lacking))
    more_bytes = step.beside_bytes - planned.more_bytes
    if more_bytes > planned.budget_bytes // 200 and planned.fits and step.calls == planned.calls:
        return Departure("held in backward what the model returned in the step before", more_bytes, is_understood=True)
    return None


def expect(planned: PlannedStep) -> None:
    """Note the bytes that the first call of a step should hold under its plan when it returns."""
    over_time = timeline(planned.profile, planned.plan)
    planned.begin_bytes = int(over_time.total_bytes[0]) if len(over_time.total_bytes) else 0
    backward = np.flatnonzero(over_time.phases == BACKWARD)
    log = planned.profile.log.events
    begins = next((at for at, event in enumerate(log) if event[:2] == (PHASE, BACKWARD)), 0)
    is_within = any(event[0] == RETURN for event in log[begins:])  # As where a layer takes a gradient of its own.
    if len(planned.calls) > 1 or is_within or not len(backward) or not backward[0]:
        return
    total_bytes = over_time.total_bytes[: backward[0]]
    # Since the last unit began: the last step's output is replaced after the call, and the loop may compute the loss.
    last = np.flatnonzero(over_time.calls[: backward[0]] >= 0)[-1:]
    since = np.flatnonzero(over_time.calls[: backward[0]] == over_time.calls[last])[:1] if len(last) else last
    held_bytes = int(max(total_bytes[since[0] if len(since) else 0 :]) - min(total_bytes))
    planned.most_held_bytes = held_bytes + held_bytes // 20


class CallWatch:
    """Begins and ends with the calls of one model, and reads the bytes held where memory is nearly fullest: after forward.

    The meter shares nothing with the planner's. With `keeps_to_plan`, foreseen units run as planned after a departure; with
    `joins_others`, other processes follow the same plan.
    """

    def __init__(self, placement: Placement, device: torch.device, *, keeps_to_plan: bool, joins_others: bool) -> None:
        self._placement = placement
        self._device = device
        self._keeps_to_plan = keeps_to_plan
        self._joins_others = joins_others
        self._begin: int | None = None
        self._is_new = False
        self._num_traces = self._first_node = 0
        self._next_s = self._next_count_s = 0.0
        self._num_counts = self._other_bytes = 0

    def missing_room(self, planned: PlannedStep) -> int:
        """Return how many more bytes tensors take before a step than its plan foresees and has room for."""
        self._read(planned)
        if self._begin is None or planned.is_compiling or not planned.fits:
            return 0
        # What has been allocated since the last count may be the loop's data, or this package's records and plans.
        seems_held = self._begin - self._other_bytes - planned.held_before
        may_count = self._num_counts < _ALWAYS_READ or time.perf_counter() > self._next_count_s
        more_bytes = max(planned.more_bytes, _GROWTH_BYTES)
        if not may_count or seems_held <= more_bytes:
            return 0
        begin_s = time.perf_counter()
        forget_last_step()  # As the first unit would: of what the loop still holds, the tape has copies that it made again.
        now = tensor_bytes(self._device, enough_bytes=planned.held_before + more_bytes)
        self._begin = held_now(self._device) or 0
        self._other_bytes = self._begin - now
        self._num_counts += 1
        self._next_count_s = begin_s + (time.perf_counter() - begin_s) / _COUNT_PRICE
        planned.held_before = min(planned.held_before, now)
        growth_bytes = now - planned.held_before
        missing_bytes = beyond_noise(growth_bytes - planned.more_bytes, planned) if growth_bytes > _GROWTH_BYTES else 0
        self._is_new &= not missing_bytes  # Planning again takes memory, too.
        return missing_bytes

    def _read(self, planned: PlannedStep) -> None:
        """Read the meter before a call, unless that has been done; not before all calls if the allocator is slow."""
        if self._is_new:
            return
        self._is_new = True
        planned.num_calls += 1
        self._num_traces, self._first_node = GraphForward.num_traces, next_autograd_node()
        if is_capturing():
            self._begin = None
            return
        begin_s = time.perf_counter()
        if begin_s < self._next_s and planned.num_calls > _ALWAYS_READ and planned.num_calls % _READ_EVERY:
            self._begin = None
            return
        self._begin = held_now(self._device)
        self._next_s = begin_s + 2 * (time.perf_counter() - begin_s) / _PRICE

    def begin(self, step: StepUnderWay, *, is_planned: bool) -> None:
        """Say which runs of units the last call so far may have; `is_planned`: the plan in place is meant for the step."""
        active = self._placement.active if is_planned else None
        foreseen = None if active is None else active.foreseen(step.calls)
        if active is None or foreseen is None:
            step.foresee(None)
            self._placement.units.allow_all()
            return
        course, spare = foreseen
        step.foresee(course)
        step.planned = active
        self._read(active)
        # If others run collectives again in backward, this process must do the same.
        keeps_to_plan = self._keeps_to_plan or (self._joins_others and active.needs_all_ranks)
        self._placement.units.allow(course, spare, keeps_to_plan=keeps_to_plan)

    def end(self, step: StepUnderWay, structure: Structure, output: Any) -> None:
        """Read after forward how many bytes a call holds; more than its plan foresees is a departure."""
        if not self._joins_others:
            step.returned.add(made_in(output))
        if step.state is State.RECORDING:
            structure.take_hooks()
        active = self._placement.active
        comes_to = self._placement.units.comes_to()
        # Memory for spare runs is counted separately.
        if active is not None and step.departure is None and step.is_last_foreseen() and comes_to <= 0:
            more_bytes = self._excess(active, step, is_whole=not comes_to)
            if more_bytes:
                step.departure = Departure("held more after forward than its plan foresees", more_bytes)
        self._is_new = False

    def _excess(self, planned: PlannedStep, step: StepUnderWay, *, is_whole: bool) -> int:
        """Return how many more bytes the last call holds than others like it under a plan, and than the plan has room for.

        `is_whole`: all unit runs that the plan foresees happened; such calls set the expected bytes.
        """
        has_traced = GraphForward.num_traces > self._num_traces
        now = None if self._begin is None or planned.is_compiling or has_traced else held_now(self._device)
        if now is None or self._begin is None:
            return 0
        position, call = len(step.calls), step.calls[-1]
        known = planned.held.setdefault((position, call), deque(maxlen=_MOST_READINGS))
        # Garbage that is collected in a call makes one reading too low, not most of them.
        usual = statistics.median(known) if len(known) == _MOST_READINGS else math.inf
        of_collectives = _COLLECTIVES_BYTES if self._device.type == "cpu" and has_process_group() else 0
        least = usual
        is_foretold = position == 1 and call == planned.calls[0] and not step.ran_backward_within()
        if is_foretold and planned.most_held_bytes is not None:
            num_nodes = next_autograd_node() - self._first_node if self._device.type == "cpu" else 0
            least = min(usual, planned.most_held_bytes + max(_OWN_BYTES, num_nodes * _NODE_BYTES))
        foreseen = now if least == math.inf else self._begin + int(least) + of_collectives + planned.more_bytes
        for _ in range(_READ_AGAIN):
            if not beyond_noise(now - foreseen, planned):
                break
            time.sleep(_PAUSE_S)
            now = min(now, held_now(self._device) or now)
        if is_whole:
            known.append(now - self._begin)
        return beyond_noise(now - foreseen, planned)


def beyond_noise(nbytes: int, planned: PlannedStep) -> int:
    """Return a difference of two readings; 0 if it is too small to matter."""
    return nbytes if nbytes > max(_NOISE_BYTES, planned.budget_bytes // 200) else 0
