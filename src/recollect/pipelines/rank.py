"""What one rank of a pipeline runs: its stages, or parts of them, and its actions, or as few as need as much memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recollect.pipelines.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Loop, PipelineAction
from recollect.pipelines.stage_parts import RecordedStage

__all__ = ["Rank", "RankStage", "first_actions", "left_out"]


@dataclass(frozen=True, eq=False)
class RankStage:
    """One of a rank's stages, and what it exchanges with others.

    Attributes:
        recorded: on one micro-batch.
        output_bytes: what a micro-batch makes: what the next stage receives, or the output of the last one.
        is_first, is_last: whether it is the first or the last of the pipeline.
        next_is_here, previous_is_here: whether the stage after or before it runs on the same rank.
        next_is_inside, previous_is_inside: whether it is a part of a stage, as the next or the previous one is.
    """

    recorded: RecordedStage
    output_bytes: int
    is_first: bool
    is_last: bool
    next_is_here: bool
    previous_is_here: bool
    next_is_inside: bool = False
    previous_is_inside: bool = False

    @property
    def receives_input(self) -> bool:
        """Whether its input comes from another rank."""
        return not (self.is_first or self.previous_is_here or self.previous_is_inside)

    @property
    def sends_output(self) -> bool:
        """Whether its output goes to another rank."""
        return not (self.is_last or self.next_is_here or self.next_is_inside)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for stages that do alike."""
        parts = [None if found is None else id(found) for found in (self.recorded.whole, self.recorded.halves)]
        others = (self.next_is_here, self.previous_is_here, self.next_is_inside, self.previous_is_inside)
        return *parts, self.output_bytes, self.is_first, self.is_last, *others


@dataclass(frozen=True, eq=False)
class Rank:
    """What one rank runs.

    Attributes:
        stages: in order.
        actions: of the rank, or as many as `first_actions` returns; their stages are numbers in `stages`.
        num_micro_batches: of the whole step.
        loop: that runs the actions.
        as_needed, receives: whether, and before which action, it makes a buffer when it is needed; see `PipelineSchedule`.
        left_out: of each stage, micro-batches that are not among the actions, and whose outputs and gradients count as sent
            before them; see `left_out`.
    """

    stages: tuple[RankStage, ...]
    actions: tuple[PipelineAction, ...]
    num_micro_batches: int
    loop: Loop
    as_needed: bool
    receives: tuple[tuple[PipelineAction, PipelineAction], ...]
    left_out: tuple[int, ...]

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for ranks that do alike."""
        stages = tuple(stage.key for stage in self.stages)
        return stages, self.actions, self.num_micro_batches, self.loop, self.as_needed, self.receives, self.left_out


def first_actions(actions: Sequence[PipelineAction]) -> tuple[PipelineAction, ...]:
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


def left_out(actions: Sequence[PipelineAction], some: Sequence[PipelineAction]) -> tuple[int, ...]:
    """Return, for each of a rank's stages, how many more micro-batches have run than in some of the actions, at most.

    Compared are moments at which as many are in flight in all places, the last ones with all actions and with some of them: by
    then most was sent.
    """
    of_all, of_some = _last_moments(actions), _last_moments(some)
    return tuple(
        max(
            of_all[moment].get(stage, 0) - counts.get(stage, 0)
            for moment, counts in of_some.items()
            if moment in of_all
        )
        for stage in sorted({action.stage for action in actions})
    )


_Place = tuple[int, str]


"""A stage, and where its micro-batches are: before backward, or between its halves."""


_Moment = tuple[tuple[_Place, int], ...]


"""How many micro-batches are in each place."""


def _last_moments(actions: Sequence[PipelineAction]) -> dict[_Moment, dict[int, int]]:
    """Return each moment after a forward or a gradient was made; of its last occurrence, how many forwards stages have run."""
    alive: dict[_Place, int] = {}
    forwards: dict[int, int] = {}
    found: dict[_Moment, dict[int, int]] = {}
    for action in actions:
        before, between = (action.stage, FORWARD), (action.stage, INPUT)
        alive[before] = alive.get(before, 0) + {FORWARD: 1, BACKWARD: -1, INPUT: -1, WEIGHT: 0}[action.kind]
        alive[between] = alive.get(between, 0) + {FORWARD: 0, BACKWARD: 0, INPUT: 1, WEIGHT: -1}[action.kind]
        forwards[action.stage] = forwards.get(action.stage, 0) + (action.kind == FORWARD)
        if action.kind in (FORWARD, INPUT):
            found[tuple(sorted(alive.items()))] = dict(forwards)
    return found


def _fullest(actions: Sequence[PipelineAction]) -> set[_Moment]:
    """Return the numbers in flight in all places, at the moments that no other moment has more of each."""
    seen = _last_moments(actions)
    return {one for one in seen if not any(other != one and _is_at_least(dict(other), dict(one)) for other in seen)}


def _is_at_least(other: dict[_Place, int], one: dict[_Place, int]) -> bool:
    return all(other.get(place, 0) >= count for place, count in one.items())
