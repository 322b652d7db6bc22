"""Put the recorded micro-batches of a rank's stages together, in the order of its schedule, as one step to plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from recollect.errors import ProfileFormatError
from recollect.pipelines.schedule import FORWARD, PipelineAction
from recollect.plans.plan import Plan
from recollect.profile import events
from recollect.profile.events import Event, StepLog
from recollect.profile.graph import UnitCall
from recollect.profile.profile import Profile

__all__ = ["rank_profile", "shortened", "stage_plan", "unit_path"]

_STORAGE_EVENTS: Final = (events.ALLOC, events.FREE)
_CALL_EVENTS: Final = (events.OP, events.DIES, events.RETURN)
_HANDLE_EVENTS: Final = (events.USE, events.RELEASE)


def rank_profile(
    actions: Sequence[PipelineAction], profiles: Sequence[Profile], num_micro_batches: int, *, holds_sent: bool
) -> Profile:
    """Return the step of one rank, in which micro-batches are in flight as its schedule has them.

    Its units are named `<stage>.<path>`. What lives throughout the step is that of all stages of the rank: parameters,
    gradients, optimizer state, and the buffers that torch receives into, one for each micro-batch: of the inputs, and of the
    outputs' gradients. A stage's output is held from its forward to the end of its backward; the gradient that it sends, to
    the end of its next backward, since the loop that sends it holds it until then.

    Args:
        actions: of the rank, or as many as `shortened` returns.
        profiles: of all stages of the pipeline, each of one micro-batch.
        num_micro_batches: of the whole step.
        holds_sent: outputs and gradients that were sent are held to the end of the step; see `PipelineSchedule`.

    Raises:
        ProfileFormatError: a profile without gradients that accumulate.

    Complexity: linear in the events of all actions.
    """
    stages = sorted({action.stage for action in actions})
    for number in stages:
        _check(number, profiles[number])
    persistent: dict[str, int] = {}
    for number in stages:
        for kind, nbytes in _persistent(number, profiles, num_micro_batches).items():
            persistent[kind] = persistent.get(kind, 0) + nbytes
    left_out = num_micro_batches - len({action.micro_batch for action in actions})
    writer = _Writer(stages, profiles, left_out, holds_sent=holds_sent)
    for action in actions:
        writer.add(action)
    first = profiles[stages[0]]
    return replace(
        first,
        graphs=tuple(writer.graphs),
        calls=tuple(writer.calls),
        log=StepLog(blocks=((*writer.log, *writer.optimizer_steps()),), sequence=((0, -1),)),
        step_s=sum(profiles[action.stage].step_s for action in actions if action.kind == FORWARD),
        persistent=persistent,
        calibration_bytes=max(profiles[number].calibration_bytes for number in stages),
        model_class=f"stages {', '.join(map(str, stages))} of a pipeline",
        batch=f"{num_micro_batches} micro-batches",
    )


def shortened(actions: Sequence[PipelineAction]) -> tuple[PipelineAction, ...]:
    """Return a rank's actions for the first micro-batches only: so many that as many are in flight as with all of them.

    One more is there, whose backward finds what the one before it sent. Later ones find no more, and every plan saves and
    costs the same share of them.
    """
    fullest = _fullest(actions)
    num_micro_batches = len({action.micro_batch for action in actions})
    # With fewer than a stage has in flight there can be no such moment.
    fewest = max((count for counts in fullest for _, count in counts), default=1)
    for most in range(fewest, num_micro_batches):
        if _fullest([action for action in actions if action.micro_batch < most]) == fullest:
            return tuple(action for action in actions if action.micro_batch <= most)
    return tuple(actions)


def _fullest(actions: Sequence[PipelineAction]) -> set[tuple[tuple[int, int], ...]]:
    """Return the numbers in flight of all stages, at the moments that no other moment has more of each."""
    alive: dict[int, int] = {}
    seen = set()
    for action in actions:
        alive[action.stage] = alive.get(action.stage, 0) + (1 if action.kind == FORWARD else -1)
        if action.kind == FORWARD:
            seen.add(tuple(sorted(alive.items())))
    return {one for one in seen if not any(other != one and _is_at_least(dict(other), dict(one)) for other in seen)}


def _is_at_least(other: dict[int, int], one: dict[int, int]) -> bool:
    return all(other.get(stage, 0) >= count for stage, count in one.items())


def stage_plan(plan: Plan, stage: int, profile: Profile) -> Plan:
    """Return the part of a rank's plan that is for one stage, with the stage's own paths."""
    units = {
        call.path: plan.units[path] for call in profile.calls if (path := unit_path(stage, call.path)) in plan.units
    }
    return replace(plan, units=units)


def unit_path(stage: int, path: str) -> str:
    """Return the path of a stage's unit in the step of its rank."""
    return f"{stage}.{path}" if path else str(stage)


def _check(number: int, profile: Profile) -> None:
    if profile.persistent.get("parameters", 0) and not profile.persistent.get("gradients", 0):
        raise ProfileFormatError(
            f"stage {number}, {profile!r}: got no gradients that accumulate, expected those of a micro-batch after the "
            "first; record it as record(stage, micro_batch, loss_fn=..., gradients='accumulated', holds_output=False)"
        )


def _sent_bytes(number: int, profiles: Sequence[Profile]) -> int:
    """Return the size of what a stage sends: what the next one receives, its micro-batch."""
    return profiles[number + 1].persistent.get("batch", 0) if number + 1 < len(profiles) else 0


def _last_bytes(profile: Profile) -> int:
    """Return the size of what the last unit returns, such as logits: the output of the last stage, from which the loss is."""
    if not profile.calls:
        return 0
    return sum(value.nbytes for value in profile.graph_of(profile.calls[-1]).values if value.is_output)


def _persistent(number: int, profiles: Sequence[Profile], num_micro_batches: int) -> dict[str, int]:
    found = dict(profiles[number].persistent)
    found["batch"] = num_micro_batches * (found.get("batch", 0) + _sent_bytes(number, profiles))
    return found


class _Parts:
    """The events of one micro-batch in parts.

    Attributes:
        forward, backward, optimizer: the events of each.
        left_behind: events that free what is alive after backward: the input's gradient, which is sent to the stage before.
        num_storages, num_handles: how many numbers the events use.
    """

    def __init__(self, number: int, profile: Profile) -> None:
        whole = _without_last_step(profile.log.events())
        begins = {phase: whole.index((events.PHASE, phase)) for phase in range(3) if (events.PHASE, phase) in whole}
        if events.BACKWARD not in begins or (events.PHASE, events.FORWARD) in whole[begins[events.BACKWARD] :]:
            raise ProfileFormatError(
                f"stage {number}, {profile!r}: got a step of several micro-batches, or without backward, expected one "
                "forward and one backward; record it on one micro-batch"
            )
        end = begins.get(events.OPTIMIZER, len(whole))
        self.forward = whole[: begins[events.BACKWARD]]
        self.backward = whole[begins[events.BACKWARD] : end]
        self.optimizer = whole[end:]
        self.left_behind = _left_behind(profile, whole[:end])
        self.num_storages = 1 + max((event[1] for event in whole if event[0] in _STORAGE_EVENTS), default=-1)
        self.num_handles = 1 + max((event[3] for event in whole if event[0] == events.SAVE), default=-1)


def _without_last_step(step: Iterable[Event]) -> list[Event]:
    """Return the events without storages that the step found: the gradient of the last step's input, which a pipeline sends."""
    whole = list(step)
    is_work = (event[0] in (events.WORK, events.OP) for event in whole)
    first_work = next((position for position, found in enumerate(is_work) if found), len(whole))
    found = {event[1] for event in whole[:first_work] if event[0] == events.ALLOC}
    return [event for event in whole if event[0] not in _STORAGE_EVENTS or event[1] not in found]


def _left_behind(profile: Profile, part: Sequence[Event]) -> list[Event]:
    alive: dict[Event, None] = {}
    for code, *operands in part:
        if code == events.ALLOC:
            alive[events.FREE, operands[0]] = None
        elif code == events.OP:
            call, op = operands
            for value in profile.graph_of(profile.calls[call]).ops[op].outputs:
                alive[events.DIES, call, value] = None
        elif code in (events.FREE, events.DIES):
            alive.pop((code, *operands), None)
    return list(alive)


class _Writer:
    """Writes the events of micro-batches one after the other, each with numbers of its own."""

    def __init__(self, stages: Sequence[int], profiles: Sequence[Profile], left_out: int, *, holds_sent: bool) -> None:
        self.graphs = [graph for number in stages for graph in profiles[number].graphs]
        self.calls: list[UnitCall] = []
        self.log: list[Event] = []
        self._profiles = profiles
        self._parts = {number: _Parts(number, profiles[number]) for number in stages}
        self._sends = {number: number + 1 < len(profiles) for number in stages}
        self._output_bytes = {n: _sent_bytes(n, profiles) or _last_bytes(profiles[n]) for n in stages}
        self._first_graph: dict[int, int] = {}
        count = 0
        for number in stages:
            self._first_graph[number] = count
            count += len(profiles[number].graphs)
        self._num_storages = self._num_handles = 0
        self._holds_sent = holds_sent
        # Of each stage: events that free the gradient that it sent last.
        self._sent: dict[int, list[Event]] = {}
        # For each micro-batch in flight: its first call, storage and handle, and the storage of its output.
        self._open: dict[tuple[int, int], tuple[int, int, int, int]] = {}
        if holds_sent:
            # What was sent for micro-batches that are left out: as if they had run before.
            for number in stages:
                received_bytes = profiles[number].persistent.get("batch", 0) if number else 0
                self._allocate(left_out * (_sent_bytes(number, profiles) + received_bytes))

    def add(self, action: PipelineAction) -> None:
        """Add a forward, with calls of its own, or the backward of one."""
        parts = self._parts[action.stage]
        key = action.stage, action.micro_batch
        if action.kind == FORWARD:
            output = self._num_storages + parts.num_storages
            self._open[key] = len(self.calls), self._num_storages, self._num_handles, output
            self._add_calls(action.stage, self._num_storages)
            self._write(parts.forward, *self._open[key][:3])
            self._num_storages = output
            self._allocate(self._output_bytes[action.stage])
            self._num_handles += parts.num_handles
        else:
            call, storage, handle, output = self._open.pop(key)
            self._write(parts.backward, call, storage, handle)
            if not (self._holds_sent and self._sends[action.stage]):
                self.log.append((events.FREE, output))
            if not self._holds_sent:
                self.log += self._sent.get(action.stage, ())
                self._sent[action.stage] = self._renumbered(parts.left_behind, call, storage, handle)

    def _allocate(self, nbytes: int) -> None:
        self.log.append((events.ALLOC, self._num_storages, nbytes))
        self._num_storages += 1

    def optimizer_steps(self) -> list[Event]:
        """Return the events of the stages' optimizer steps, one after the other."""
        steps: list[Event] = []
        for parts in self._parts.values():
            steps += self._renumbered(parts.optimizer, 0, self._num_storages, 0)
            self._num_storages += parts.num_storages
        return steps

    def _add_calls(self, stage: int, first_storage: int) -> None:
        first = len(self.calls)
        for call in self._profiles[stage].calls:
            self.calls.append(
                replace(
                    call,
                    path=unit_path(stage, call.path),
                    graph=self._first_graph[stage] + call.graph,
                    origins=tuple((value, first + source, there) for value, source, there in call.origins),
                    outside=tuple((value, first_storage + storage) for value, storage in call.outside),
                )
            )

    def _write(self, part: Sequence[Event], call: int, storage: int, handle: int) -> None:
        self.log += self._renumbered(part, call, storage, handle)

    def _renumbered(self, part: Sequence[Event], call: int, storage: int, handle: int) -> list[Event]:
        renumbered: list[Event] = []
        for code, *operands in part:
            if code in _STORAGE_EVENTS:
                operands[0] += storage
            elif code in _CALL_EVENTS:
                operands[0] += call
            elif code == events.SAVE:
                saved, value, number, saver = operands
                operands = [saved + call, value, number + handle, saver + call]
            elif code in _HANDLE_EVENTS:
                operands[0] += handle
            renumbered.append((code, *operands))
        return renumbered
