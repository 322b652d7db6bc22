"""Play a pipeline's schedule: how long its step takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from recollect.errors import ScheduleError
from recollect.pipelines.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, PipelineAction, PipelineSchedule


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one micro-batch of a stage; recompute is part of what it is for.

    Attributes:
        forward_s, backward_s: of forward, and of a whole backward.
        input_s, weight_s: of the halves of a backward.
    """

    forward_s: float
    backward_s: float = 0.0
    input_s: float = 0.0
    weight_s: float = 0.0

    def of(self, kind: str) -> float:
        """Return the seconds of an action of this kind."""
        return {FORWARD: self.forward_s, BACKWARD: self.backward_s, INPUT: self.input_s, WEIGHT: self.weight_s}[kind]


def played_s(schedule: PipelineSchedule, lasts: Callable[[PipelineAction], float], *, send_s: float = 0.0) -> float:
    """Return the seconds from the first forward to the last backward.

    Each rank runs its actions in order, each as soon as its input is there: a forward waits for the stage before, a backward,
    or the first half of one, for the stage behind.

    Args:
        schedule: what each rank runs.
        lasts: the seconds of each action.
        send_s: seconds to send a micro-batch from one stage to the next; a stage on the same rank gets it at once.

    Raises:
        ScheduleError: the ranks wait for each other for ever.
    """
    rank_of = {stage: rank for rank in range(len(schedule.ranks)) for stage in schedule.stages_of(rank)}
    num_stages = schedule.num_stages
    # When the output of a stage, or the gradient of its input, is there: (is it the gradient, stage, micro-batch).
    made: dict[tuple[bool, int, int], float] = {}
    clocks = [0.0] * len(schedule.ranks)
    position = [0] * len(schedule.ranks)
    while waiting := [r for r, actions in enumerate(schedule.ranks) if position[r] < len(actions)]:
        ran = False
        for rank in waiting:
            actions = schedule.ranks[rank]
            while position[rank] < len(actions):
                action = actions[position[rank]]
                source = _source(action, num_stages)
                if source is not None and source not in made:
                    break
                ready = 0.0
                if source is not None:
                    ready = made[source] + (send_s if rank_of[source[1]] != rank else 0.0)
                clocks[rank] = max(clocks[rank], ready) + lasts(action)
                if action.kind != WEIGHT:
                    made[action.kind != FORWARD, action.stage, action.micro_batch] = clocks[rank]
                position[rank] += 1
                ran = True
        if not ran:
            stuck = ", ".join(f"rank {rank} at {schedule.ranks[rank][position[rank]]}" for rank in waiting)
            raise ScheduleError(f"the ranks wait for each other: {stuck}")
    return max(clocks)


def _source(action: PipelineAction, num_stages: int) -> tuple[bool, int, int] | None:
    """Return what an action needs from another stage, as `played_s` names it."""
    if action.kind == FORWARD and action.stage:
        return False, action.stage - 1, action.micro_batch
    if action.kind in (BACKWARD, INPUT) and action.stage < num_stages - 1:
        return True, action.stage + 1, action.micro_batch
    return None
