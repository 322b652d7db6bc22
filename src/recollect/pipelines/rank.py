"""The work of one pipeline rank: its stages, or parts of them, and its actions, or the fewest that need as much memory.

Of a stage, one micro-batch was recorded, which is cut into the parts that a schedule runs one by one.

Also the buffers through which stages exchange tensors, where torch makes them when needed (since 2.15).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from recollect.errors import ProfileFormatError
from recollect.pipelines.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Loop, PipelineAction
from recollect.plans.plan import Plan
from recollect.profile import events
from recollect.profile.events import Event
from recollect.profile.profile import Profile
from recollect.simulation.peak_sums import PeakSums
from recollect.simulation.timeline import timeline

STORAGE_EVENTS: Final = (events.ALLOC, events.FREE)
_ENDS: Final = (events.DIES, events.FREE, events.LET_GO, events.RELEASE)


@dataclass(frozen=True)
class RecordedStage:
    """A stage, or a part of one, as it was recorded on one micro-batch; equal to others with the same record."""

    number: int = field(compare=False)
    whole: StageParts
    halves: StageParts | None
    """With one in two halves; None if no schedule splits it."""

    def parts_of(self, kind: str) -> StageParts:
        found = self.whole if kind == BACKWARD else self.halves
        assert found is not None
        return found


class StageParts:
    """The events of one recorded micro-batch in parts: those of each kind of action, and of the optimizer step.

    Of the last stage, `let_go` has the events that free its outputs, with bytes, by the backward, or half of one, at whose
    end they come at the earliest. `left_behind` has those that free storages alive after backward: the input's gradient, which
    is sent to the stage before. `num_storages` and `num_handles`: how many numbers the events use.
    """

    def __init__(self, number: int, profile: Profile, *, is_last: bool = False) -> None:
        self.profile = profile
        whole = _without_last_step(profile.log.events)
        begins = {phase: whole.index((events.PHASE, phase)) for phase in range(3) if (events.PHASE, phase) in whole}
        if events.BACKWARD not in begins or (events.PHASE, events.FORWARD) in whole[begins[events.BACKWARD] :]:
            raise ProfileFormatError(
                f"stage {number}, {profile!r}: got a step of several micro-batches, or without backward, expected one "
                "forward and one backward; record it on one micro-batch"
            )
        end = begins.get(events.OPTIMIZER, len(whole))
        backward = whole[begins[events.BACKWARD] : end]
        half = _end_of_first_half(backward)
        weight = backward[half:]
        if weight[:1] != [(events.PHASE, events.BACKWARD)]:
            weight.insert(0, (events.PHASE, events.BACKWARD))
        parts = {
            FORWARD: whole[: begins[events.BACKWARD]],
            BACKWARD: backward,
            INPUT: backward[:half],
            WEIGHT: weight,
        }
        outputs = frozenset(profile.outputs if is_last else ())
        self.parts: Mapping[str, Sequence[Event]] = {
            kind: [event for event in part if event not in outputs] for kind, part in parts.items()
        }
        self.optimizer = whole[end:]
        alive = _left_behind(profile, [*self.parts[FORWARD], *self.parts[BACKWARD]])
        self.left_behind = [event for event in alive if event not in outputs]
        made_bytes = sum(alive[event] for event in self.left_behind if event[0] == events.FREE)
        # Frozen layers have no gradients, and leave that of their input only.
        if not profile.persistent.get("gradients", 0) and made_bytes > self.input_bytes:
            raise ProfileFormatError(
                f"stage {number}, {profile!r}: got no gradients that accumulate, expected those of a micro-batch after the "
                "first; record it as record(stage, micro_batch, loss_fn=..., gradients='accumulated', holds_output=False)"
            )
        output = {event: nbytes for event, nbytes in alive.items() if event in outputs}
        late = outputs.intersection(weight)
        self.let_go: Mapping[str, Mapping[Event, int]] = {
            BACKWARD: output,
            INPUT: {event: nbytes for event, nbytes in output.items() if event not in late},
            WEIGHT: {event: nbytes for event, nbytes in output.items() if event in late},
        }
        self.num_storages = 1 + max((event[1] for event in whole if event[0] in STORAGE_EVENTS), default=-1)
        self.num_handles = 1 + max((event[3] for event in whole if event[0] == events.SAVE), default=-1)

    @cached_property
    def sums(self) -> PeakSums:
        return PeakSums.of(self.profile)

    @cached_property
    def forward_s(self) -> float:
        """Seconds from the first op of forward to the first of backward, without recompute."""
        plain = timeline(self.profile, Plan({}))
        is_backward = plain.phases == events.BACKWARD
        return float(plain.time_s[is_backward.argmax()]) if is_backward.any() else self.profile.step_s

    @cached_property
    def input_share(self) -> float:
        """The part of the time of backward that its first half takes."""
        works = {kind: [event for event in self.parts[kind] if event[0] == events.WORK] for kind in (INPUT, WEIGHT)}
        times = {kind: sum(time_ns for _, _, *its in found for time_ns in its) for kind, found in works.items()}
        return times[INPUT] / (sum(times.values()) or 1)

    @cached_property
    def input_bytes(self) -> int:
        return self.profile.persistent.get("batch", 0)

    @property
    def output_bytes(self) -> int:
        """Bytes of the last stage's output for the micro-batch, such as logits."""
        return sum(self.let_go[BACKWARD].values())


def _end_of_first_half(backward: Sequence[Event]) -> int:
    """Return how many events belong to the half that keeps its graph, and to its releases; 0 if there is none."""
    last = max((place for place, event in enumerate(backward) if event[0] == events.LET_GO), default=-1)
    if last < 0:
        return 0
    return next((p for p in range(last, len(backward)) if backward[p][0] not in _ENDS), len(backward))


def _without_last_step(step: Iterable[Event]) -> list[Event]:
    """Return the events without storages that the step found: the gradient of the last step's input, which a pipeline sends."""
    whole = list(step)
    is_work = (event[0] in (events.WORK, events.OP) for event in whole)
    first_work = next((position for position, found in enumerate(is_work) if found), len(whole))
    found = {event[1] for event in whole[:first_work] if event[0] == events.ALLOC}
    return [event for event in whole if event[0] not in STORAGE_EVENTS or event[1] not in found]


def _left_behind(profile: Profile, part: Sequence[Event]) -> dict[Event, int]:
    """Return the events that free storages alive after a part, with bytes."""
    alive: dict[Event, int] = {}
    for code, *operands in part:
        if code == events.ALLOC:
            alive[events.FREE, operands[0]] = operands[1]
        elif code == events.OP:
            call, op = operands
            graph = profile.graph_of(profile.calls[call])
            for value in graph.ops[op].outputs:
                alive[events.DIES, call, value] = graph.values[value].nbytes
        elif code in (events.FREE, events.DIES):
            alive.pop((code, *operands), None)
    return alive


@dataclass(frozen=True)
class RankStage:
    """One of a rank's stages, and its exchanges with others."""

    recorded: RecordedStage
    """On one micro-batch."""
    output_bytes: int
    """Result of a micro-batch: the next stage's input, or the output of the last stage."""
    is_first: bool
    is_last: bool
    """Whether it is the first or the last of the pipeline."""
    is_returned: bool
    """Whether the loop returns the outputs of all micro-batches, in one."""
    next_is_here: bool
    previous_is_here: bool
    """Whether the stage after or before it runs on the same rank."""
    next_is_inside: bool = False
    previous_is_inside: bool = False
    """Whether it is a part of a stage, as the next or the previous one is."""

    @property
    def receives_input(self) -> bool:
        return not (self.is_first or self.previous_is_here or self.previous_is_inside)

    @property
    def sends_output(self) -> bool:
        return not (self.is_last or self.next_is_here or self.next_is_inside)


@dataclass(frozen=True)
class Rank:
    """The work of one rank; equal for ranks that work alike."""

    stages: tuple[RankStage, ...]
    """In order."""
    actions: tuple[PipelineAction, ...]
    """Actions of the rank, or as many as `first_actions` returns; their stages are numbers in `stages`."""
    num_micro_batches: int
    loop: Loop
    as_needed: bool
    receives: tuple[tuple[PipelineAction, PipelineAction], ...]
    """Whether, and before which action, it makes a buffer when it is needed; see `PipelineSchedule`."""
    left_out: tuple[tuple[int, ...], ...]
    """For each action and stage: the number of micro-batches outside the actions whose outputs and gradients count as
    sent before it; see `left_out`."""

    @cached_property
    def backwards(self) -> Mapping[tuple[int, int], str]:
        """The kind of backward of each stage and micro-batch: "B", or "I" for one in halves."""
        kinds = (BACKWARD, INPUT)
        return {(action.stage, action.micro_batch): action.kind for action in self.actions if action.kind in kinds}


def first_actions(actions: Sequence[PipelineAction]) -> tuple[PipelineAction, ...]:
    """Return a rank's actions for the first micro-batches only, enough to have as many in flight as with all of them.

    One more is included, whose backward finds the gradient sent by the one before it. Later ones hold no more, and
    every plan saves and costs the same share of them.
    """
    fullest = _fullest(actions)
    num_micro_batches = len({action.micro_batch for action in actions})
    # With fewer than a stage has in flight, no such moment exists.
    fewest = max((count for counts in fullest for _, count in counts), default=1)
    for most in range(fewest, num_micro_batches):
        if _fullest([action for action in actions if action.micro_batch < most]) == fullest:
            return tuple(action for action in actions if action.micro_batch <= most)
    return tuple(actions)


def left_out(actions: Sequence[PipelineAction], some: Sequence[PipelineAction]) -> tuple[tuple[int, ...], ...]:
    """Return, for each of some of a rank's actions, how many more micro-batches of each stage have run by then, at most.

    This compares the last moments with equally many in flight everywhere, with all actions and with some: by then most
    was sent. An action counts at least as many as any later one.
    """
    of_all = dict(_moments(actions))
    most = dict.fromkeys(sorted({action.stage for action in actions}), 0)
    seen: set[_Moment] = set()
    found = []
    for moment, forwards in reversed([*_moments(some)]):
        if moment in of_all and moment not in seen:
            most = {stage: max(n, of_all[moment][stage] - forwards[stage]) for stage, n in most.items()}
        seen.add(moment)
        found.append(tuple(most.values()))
    return tuple(reversed(found))


_Place = tuple[int, str]
"""A stage, and the places of its micro-batches: before backward, or between its halves."""
_Moment = tuple[tuple[_Place, int], ...]
"""How many micro-batches are in each place."""


def _moments(actions: Sequence[PipelineAction]) -> Iterator[tuple[_Moment, Counter[int]]]:
    """Yield each action's moment with most in flight, and the number of forwards each stage has run by then."""
    alive: Counter[_Place] = Counter()
    forwards: Counter[int] = Counter()
    for action in actions:
        before, between = (action.stage, FORWARD), (action.stage, INPUT)
        forwards[action.stage] += action.kind == FORWARD
        alive[before] += {FORWARD: 1, INPUT: -1}.get(action.kind, 0)
        alive[between] += action.kind == INPUT
        yield tuple(sorted((+alive).items())), forwards.copy()
        alive[before] -= action.kind == BACKWARD
        alive[between] -= action.kind == WEIGHT


def _fullest(actions: Sequence[PipelineAction]) -> set[_Moment]:
    """Return the numbers in flight in all places, at the moments that no other moment has more of each."""
    seen = dict(_moments(actions))
    return {one for one in seen if not any(other != one and _is_at_least(dict(other), dict(one)) for other in seen)}


def _is_at_least(other: dict[_Place, int], one: dict[_Place, int]) -> bool:
    return all(other.get(place, 0) >= count for place, count in one.items())


class Buffers:
    """Buffers that stages exchange when allocated as needed; each lives until its last holder releases it.

    A holder is a micro-batch in a stage, from forward to the end of its backward; the loss, whose graph
    has the last stage's input until the step ends; or the loop, which holds an output that it sent until that arrives:
    GPipe's until all forwards are done, that of 1F1B until it sends the next, or goes backward.
    """

    def __init__(self, log: list[Event], allocate: Callable[[int], int], rank: Rank) -> None:
        self._log = log
        self._allocate = allocate
        self._rank = rank
        self._early: dict[PipelineAction, list[PipelineAction]] = {}
        for needed, before in rank.receives:
            self._early.setdefault(before, []).append(needed)
        self._received: set[tuple[tuple[int, int], bool]] = set()
        # Loops that run lists of actions leave it to the micro-batch.
        self._is_single = rank.loop is not Loop.ACTIONS
        self._sends_all_first = rank.loop is Loop.GPIPE
        self._held: dict[object, list[int]] = {}
        self._num_holders: dict[int, int] = {}

    def receive(self, action: PipelineAction) -> None:
        stage = self._rank.stages[action.stage]
        is_forward = action.kind == FORWARD
        key = action.stage, action.micro_batch
        is_received = stage.receives_input if is_forward else stage.sends_output and action.kind != WEIGHT
        if not is_received or (key, is_forward) in self._received:
            return
        self._received.add((key, is_forward))
        stays = is_forward and self.stay_with_loss(action.stage) and self._rank.backwards[key] == BACKWARD
        holder = "loss" if stays else (self._first_part(action.stage), action.micro_batch)
        self.make([holder], stage.recorded.whole.input_bytes if is_forward else stage.output_bytes)

    def _first_part(self, number: int) -> int:
        """Return the part of a stage that runs first in forward and last in backward."""
        while self._rank.stages[number].previous_is_inside:
            number -= 1
        return number

    def stay_with_loss(self, number: int) -> bool:
        """Whether this part is one of the last stage, whose inputs stay."""
        while self._rank.stages[number].next_is_inside:
            number += 1
        return self._rank.stages[number].is_last

    def make(self, holders: Sequence[object], nbytes: int) -> None:
        storage = self._allocate(nbytes)
        self._num_holders[storage] = len(holders)
        for holder in holders:
            self._held.setdefault(holder, []).append(storage)

    def let_go(self, holder: object) -> None:
        for storage in self._held.pop(holder, ()):
            self._num_holders[storage] -= 1
            if not self._num_holders[storage]:
                self._log.append((events.FREE, storage))

    def after_forward(self, key: tuple[int, int], stage: RankStage) -> None:
        """Make the output, and release the previous one if the loop has waited for it."""
        number, micro_batch = key
        arriving, own = ("sent", number), (self._first_part(number), micro_batch)
        if stage.next_is_here:
            self.make([own, (number + 1, micro_batch)], stage.output_bytes)
        elif not self._is_single:
            self.make([own], stage.output_bytes)
        else:
            before = [] if self._sends_all_first else self._held.pop(arriving, [])
            self.make([arriving], stage.output_bytes)
            self._held["before", number] = before
            self.let_go(("before", number))

    def before(self, action: PipelineAction) -> None:
        """Release outputs that have arrived, and make the buffers that this action and later ones receive into."""
        if action.kind in (BACKWARD, INPUT):
            self.let_go(("sent", action.stage))
        for needed in self._early.get(action, ()):
            self.receive(needed)
        self.receive(action)
