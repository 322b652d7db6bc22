"""Cut the recorded micro-batch of a pipeline's stage into the parts that a schedule runs one by one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from recollect.errors import ProfileFormatError
from recollect.pipelines.schedule import BACKWARD, FORWARD, INPUT, WEIGHT
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
    """The events of one recorded micro-batch in parts.

    Attributes:
        parts: the events of each kind of action.
        let_go: of the last stage: the events that free its outputs, with bytes, by the backward, or half of one, at whose
            end they come at the earliest.
        optimizer: those of the optimizer step.
        left_behind: events that free storages alive after backward: the input's gradient, which is sent to the stage before.
        num_storages, num_handles: how many numbers the events use.

    Raises:
        ProfileFormatError: gradients do not accumulate; several micro-batches; no backward.
    """

    def __init__(self, number: int, profile: Profile, *, is_last: bool = False) -> None:
        self.profile = profile
        if profile.persistent.get("parameters", 0) and not profile.persistent.get("gradients", 0):
            raise ProfileFormatError(
                f"stage {number}, {profile!r}: got no gradients that accumulate, expected those of a micro-batch after the "
                "first; record it as record(stage, micro_batch, loss_fn=..., gradients='accumulated', holds_output=False)"
            )
        whole = _without_last_step(profile.log.events())
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
        # Old profiles have no times of single ops.
        times = {kind: sum(event[2] if len(event) > 2 else 1 for event in found) for kind, found in works.items()}
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
