"""Combine the recorded micro-batches of a rank's stages, in the order of its schedule, into one step to plan."""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from recollect.errors import ProfileFormatError
from recollect.pipelines.rank import STORAGE_EVENTS, Buffers, Rank, RankStage, RecordedStage, StageParts
from recollect.pipelines.schedule import FORWARD, INPUT, WEIGHT, PipelineAction
from recollect.plans.plan import Plan
from recollect.profile import events
from recollect.profile.events import Event, StepLog
from recollect.profile.graph import UnitCall, UnitGraph
from recollect.profile.profile import Profile

_HANDLE_EVENTS: Final = (events.USE, events.PEEK, events.GIVE_BACK, events.RELEASE)


@dataclass(frozen=True)
class RankStep:
    """The step of one rank."""

    profile: Profile
    """Of all its micro-batches; units are named `<number in the rank's stages>.<path>`."""
    forwards: tuple[tuple[int, int, Profile], ...]
    """For each forward in order, (stage number, micro-batch, its recorded profile): the owner of the next calls."""
    starts: tuple[int, ...]
    """For each action of the rank, where in the log the events of its part begin."""


def rank_step(rank: Rank) -> RankStep:
    """Return the step of one rank, with micro-batches in flight as in its schedule.

    The rank's stages together make up the memory that lives throughout the step: parameters, gradients, optimizer
    state, and the buffers that torch receives into, one for each micro-batch: of the inputs, and of the outputs'
    gradients. A stage's output is held from its forward to the end of its backward, both halves of it; the gradient
    that it sends, to the end of its next backward, since the loop that sends it holds it until then. A tensor passed to
    a stage on the same rank takes the place of a buffer. The last stage's output is held until the end of its backward,
    or of the step if the step returns it. Where torch receives as needed, a buffer is there from just before the
    action that it is for until the end of the backward, both halves of it.
    """
    persistent: Counter[str] = Counter()
    for stage in rank.stages:
        persistent.update(_persistent(stage, rank))
    writer = _Writer(rank)
    for action, left_out in zip(rank.actions, rank.left_out, strict=True):
        writer.let_go(left_out)
        writer.add(action)
    writer.end()
    first = rank.stages[0].recorded.whole.profile
    numbers = [stage.recorded.number for stage in rank.stages]
    profile = replace(
        first,
        graphs=tuple(writer.graphs),
        calls=tuple(writer.calls),
        log=StepLog(tuple(writer.log)),
        step_s=sum(recorded.step_s for _, _, recorded in writer.forwards),
        persistent=dict(persistent),
        calibration_bytes=max(stage.recorded.whole.profile.calibration_bytes for stage in rank.stages),
        model_class=f"stages {', '.join(map(str, numbers))} of a pipeline",
        batch=f"{rank.num_micro_batches} micro-batches",
        class_names=tuple(
            (unit_path(stage.recorded.number, path), name)
            for stage in rank.stages
            for path, name in stage.recorded.whole.profile.class_names
        ),
    )
    return RankStep(profile, tuple(writer.forwards), tuple(writer.starts))


def stage_plan(plan: Plan, number: int, profile: Profile) -> Plan:
    units = {
        call.path: plan.units[path] for call in profile.calls if (path := unit_path(number, call.path)) in plan.units
    }
    return replace(
        plan, units=units, loss_chunks=profile.loss_chunks, class_names=profile.class_names, note=profile.times_text
    )


def unit_path(number: int, path: str) -> str:
    return f"{number}.{path}" if path else str(number)


def _persistent(stage: RankStage, rank: Rank) -> dict[str, int]:
    parts = stage.recorded.whole
    found = dict(parts.profile.persistent)
    received_bytes = 0 if stage.previous_is_inside or (rank.as_needed and not stage.is_first) else parts.input_bytes
    if not stage.is_last and not stage.next_is_inside and not rank.as_needed:
        received_bytes += stage.output_bytes
    found["batch"] = rank.num_micro_batches * received_bytes
    return found


def _form(graph: UnitGraph) -> object:
    """Describe the computation of a unit, without times."""
    values = [(value.name, value.nbytes, value.must_keep) for value in graph.values]
    return values, [(op.inputs, op.outputs, op.mutates) for op in graph.ops]


@dataclass(frozen=True)
class _InFlight:
    """A micro-batch in flight: its parts, its first call, storage and handle, and the storage of its output, if it has one."""

    parts: StageParts
    call: int
    storage: int
    handle: int
    output: int | None


def _half(kind: str, part: Sequence[Event]) -> tuple[Sequence[Event], Sequence[Event]]:
    """Return the events of a backward, and those among them that follow when all parts of the stage are done.

    Half a backward is one of all parts. The first half releases all its recomputed values together; the second needs at
    most the values of all parts before releasing them.
    """
    if kind == INPUT:
        end = next((place for place, event in enumerate(part) if event[0] == events.LET_GO), len(part))
        return part[:end], part[end:]
    if kind == WEIGHT:
        releases = [event for event in part if event[0] == events.RELEASE]
        return [event for event in part if event[0] != events.RELEASE], releases
    return part, ()


class _Writer:
    """Writes the events of micro-batches one after the other, each with its own numbers."""

    def __init__(self, rank: Rank) -> None:
        self.graphs: list[UnitGraph] = []
        self.calls: list[UnitCall] = []
        self.log: list[Event] = []
        self.forwards: list[tuple[int, int, Profile]] = []
        self.starts: list[int] = []
        self._rank = rank
        # Events that free tensors that the loop holds until the step ends.
        self._at_end: list[Event] = []
        self._first_graph: dict[int, int] = {}
        for stage in rank.stages:
            self._add_graphs(stage.recorded)
        self._num_storages = self._num_handles = 0
        # For each stage: events that free the gradient that it sent last.
        self._sent: dict[int, list[Event]] = {}
        self._open: dict[tuple[int, int], _InFlight] = {}
        self._buffers = Buffers(self.log, self.allocate, rank) if rank.as_needed else None
        # For each part of a stage and micro-batch: events that free the gradient passed to the previous part.
        self._handed: dict[tuple[int, int], list[Event]] = {}
        # For each part of a stage and micro-batch: how half of its backward ends, including later parts.
        self._ends: dict[tuple[int, int], list[Event]] = {}
        # For each stage: storages held by micro-batches that are not among the actions.
        self._left_out = [self._held_before(number, stage) for number, stage in enumerate(rank.stages)]

    def _held_before(self, number: int, stage: RankStage) -> list[int]:
        """Make each earlier micro-batch's tensors that were sent or returned and are still held."""
        output_bytes = 0 if self._buffers or not stage.sends_output else stage.output_bytes
        input_bytes = stage.recorded.whole.input_bytes if stage.receives_input else 0
        held_bytes = input_bytes if self._buffers and self._buffers.stay_with_loss(number) else 0
        held_bytes += stage.output_bytes if stage.is_returned else 0
        kinds = [action.kind for action in self._rank.actions if action.stage == number]
        if self._rank.loop.holds_sent:
            held_bytes += output_bytes + input_bytes
            # One more gradient than at the moments, which is enough if the peak lies between two of them.
            self._at_end.append((events.FREE, self.allocate(min(1, self._rank.left_out[0][number]) * input_bytes)))
        elif kinds[:2] == [FORWARD] * 2:
            # The loop of 1F1B holds the last output that it sent before it begins to alternate.
            self._at_end.append((events.FREE, self.allocate(output_bytes)))
        return [self.allocate(held_bytes) for _ in range(self._rank.left_out[0][number])]

    def let_go(self, left_out: Sequence[int]) -> None:
        """Release storages of micro-batches that are not among the actions, except this many per stage."""
        for held, count in zip(self._left_out, left_out, strict=True):
            self.log += [(events.FREE, storage) for storage in held[count:]]
            del held[count:]

    def _add_graphs(self, recorded: RecordedStage) -> None:
        """Add the graphs of a stage once: one decision holds for its micro-batches with either backward."""
        found = [parts for parts in (recorded.whole, recorded.halves) if parts is not None]
        forms = [
            ([_form(graph) for graph in parts.profile.graphs], [call.graph for call in parts.profile.calls])
            for parts in found
        ]
        if forms[0] != forms[-1]:
            raise ProfileFormatError(
                f"stage {recorded.number}: got other ops with split_backward=True than without it, expected the same forward "
                "in both; record both on the same module and micro-batch"
            )
        first = self._first_graph.get(id(found[0]), len(self.graphs))
        if first == len(self.graphs):
            self.graphs += found[0].profile.graphs
        self._first_graph.update((id(parts), first) for parts in found)

    def add(self, action: PipelineAction) -> None:
        key = action.stage, action.micro_batch
        stage = self._rank.stages[action.stage]
        if self._buffers:
            self._buffers.before(action)
        if action.kind == FORWARD:
            self._add_forward(action, stage)
            return
        found = self._open[key]
        if stage.next_is_inside and action.kind != INPUT and found.output is not None:
            # The next part has released its input.
            self.log.append((events.FREE, found.output))
            found = self._open[key] = replace(found, output=None)
        now: Sequence[Event] = found.parts.parts[action.kind]
        later: Sequence[Event] = ()
        if stage.next_is_inside or stage.previous_is_inside:
            now, later = _half(action.kind, now)
        self._ends[key] = self._renumbered(later, found) + self._ends.pop((action.stage + 1, action.micro_batch), [])
        self.starts.append(len(self.log))
        self.log += self._renumbered(now, found)
        if not stage.previous_is_inside:
            self.log += self._ends.pop(key)
        # The second half may read it.
        if action.kind != INPUT:
            self.log += self._handed.pop((action.stage + 1, action.micro_batch), ())
        if action.kind != WEIGHT:
            self._send_gradient(key, stage, found)
        # torch holds a stage's output for the second half, but not the last one's.
        self.log += self._renumbered(found.parts.let_go[action.kind], found)
        if stage.is_returned:
            self.allocate(sum(found.parts.let_go[action.kind].values()))
        # torch holds the tensors that a stage has sent for the second half.
        if action.kind == INPUT:
            return
        if found.output is not None:
            holds_sent = self._rank.loop.holds_sent and stage.sends_output
            (self._at_end if holds_sent else self.log).append((events.FREE, found.output))
        del self._open[key]
        if self._buffers:
            self._buffers.let_go(key)

    def _add_forward(self, action: PipelineAction, stage: RankStage) -> None:
        key = action.stage, action.micro_batch
        parts = stage.recorded.parts_of(self._rank.backwards[key])
        found = _InFlight(parts, len(self.calls), self._num_storages, self._num_handles, None)
        self._add_calls(action.stage, parts)
        self.forwards.append((action.stage, action.micro_batch, parts.profile))
        self.starts.append(len(self.log))
        self.log += self._renumbered(parts.parts[FORWARD], found)
        self._num_storages += parts.num_storages
        self._num_handles += parts.num_handles
        if self._buffers and not (stage.is_last or stage.next_is_inside):
            self._buffers.after_forward(key, stage)
        elif not (stage.next_is_here or stage.is_last):
            found = replace(found, output=self._num_storages)
            self.allocate(stage.output_bytes)
        self._open[key] = found

    def _send_gradient(self, key: tuple[int, int], stage: RankStage, found: _InFlight) -> None:
        frees = self._renumbered(found.parts.left_behind, found)
        number = key[0]
        if stage.previous_is_inside or (self._buffers and stage.previous_is_here):
            self._handed[key] = frees
        elif stage.previous_is_here:
            self.log += frees
        elif self._rank.loop.holds_sent:
            self._at_end += frees
        else:
            self.log += self._sent.get(number, ())
            self._sent[number] = frees

    def allocate(self, nbytes: int) -> int:
        self.log.append((events.ALLOC, self._num_storages, nbytes))
        self._num_storages += 1
        return self._num_storages - 1

    def end(self) -> None:
        """Concatenate the outputs that the step returns; then run the stages' optimizer steps, one after the other."""
        self.log += itertools.chain(self._at_end, *self._sent.values())
        self.let_go([0] * len(self._rank.stages))
        of_all = self._rank.num_micro_batches
        num_left_out = of_all - len({micro_batch for _, micro_batch, _ in self.forwards})
        for stage in self._rank.stages:
            if stage.is_returned:
                self.allocate(num_left_out * stage.output_bytes)
                self.log.append((events.FREE, self.allocate(of_all * stage.output_bytes)))
        for stage in self._rank.stages:
            parts = stage.recorded.whole
            self.log += self._renumbered(parts.optimizer, _InFlight(parts, 0, self._num_storages, 0, None))
            self._num_storages += parts.num_storages

    def _add_calls(self, number: int, parts: StageParts) -> None:
        first = len(self.calls)
        for call in parts.profile.calls:
            self.calls.append(
                replace(
                    call,
                    path=unit_path(number, call.path),
                    graph=self._first_graph[id(parts)] + call.graph,
                    origins=tuple((value, first + source, there) for value, source, there in call.origins),
                    outside=tuple((value, self._num_storages + storage) for value, storage in call.outside),
                )
            )

    def _renumbered(self, part: Iterable[Event], found: _InFlight) -> list[Event]:
        renumbered: list[Event] = []
        for code, *operands in part:
            if code in STORAGE_EVENTS:
                operands[0] += found.storage
            elif code in (events.OP, events.DIES, *events.OF_CALLS):
                operands[0] += found.call
            elif code == events.SAVE:
                saved, value, number, saver = operands
                operands = [saved + found.call, value, number + found.handle, saver + found.call]
            elif code in _HANDLE_EVENTS:
                operands[0] += found.handle
            renumbered.append((code, *operands))
        return renumbered
