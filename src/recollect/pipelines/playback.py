"""Play a pipeline's schedule: how long its step takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recollect.errors import ScheduleError
from recollect.pipelines.schedule import BACKWARD, FORWARD, PipelineAction, PipelineSchedule

__all__ = ["StageTimes", "step_s"]


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one micro-batch of a stage; recompute is part of backward."""

    forward_s: float
    backward_s: float


def step_s(schedule: PipelineSchedule, times: Sequence[StageTimes], *, send_s: float = 0.0) -> float:
    """Return the seconds from the first forward to the last backward.

    Each rank runs its actions in order, each as soon as its input is there: a forward waits for the stage before, a backward
    for the stage behind.

    Args:
        schedule: what each rank runs.
        times: of all stages.
        send_s: seconds to send a micro-batch from one stage to the next; a stage on the same rank gets it at once.

    Raises:
        ScheduleError: the ranks wait for each other for ever.
    """
    rank_of = {stage: rank for rank in range(len(schedule.ranks)) for stage in schedule.stages_of(rank)}
    ended: dict[PipelineAction, float] = {}
    clocks = [0.0] * len(schedule.ranks)
    position = [0] * len(schedule.ranks)
    while waiting := [r for r, actions in enumerate(schedule.ranks) if position[r] < len(actions)]:
        ran = False
        for rank in waiting:
            while position[rank] < len(schedule.ranks[rank]):
                action = schedule.ranks[rank][position[rank]]
                source = _source(action, len(times))
                if source is not None and source not in ended:
                    break
                ready = 0.0
                if source is not None:
                    ready = ended[source] + (send_s if rank_of[source.stage] != rank else 0.0)
                own = times[action.stage]
                lasts = own.forward_s if action.kind == FORWARD else own.backward_s
                clocks[rank] = ended[action] = max(clocks[rank], ready) + lasts
                position[rank] += 1
                ran = True
        if not ran:
            stuck = ", ".join(f"rank {rank} at {schedule.ranks[rank][position[rank]]}" for rank in waiting)
            raise ScheduleError(f"the ranks wait for each other: {stuck}")
    return max(clocks)


def _source(action: PipelineAction, num_stages: int) -> PipelineAction | None:
    """Return the action whose result this one needs from another stage."""
    if action.kind == FORWARD:
        return None if action.stage == 0 else PipelineAction(action.stage - 1, FORWARD, action.micro_batch)
    if action.stage == num_stages - 1:
        return None
    return PipelineAction(action.stage + 1, BACKWARD, action.micro_batch)
