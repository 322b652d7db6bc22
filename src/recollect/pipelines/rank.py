"""What one rank of a pipeline runs: its stages, or parts of them, and its actions in order."""

from __future__ import annotations

from dataclasses import dataclass

from recollect.pipelines.schedule import Loop, PipelineAction
from recollect.pipelines.stage_parts import RecordedStage

__all__ = ["Rank", "RankStage"]


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
