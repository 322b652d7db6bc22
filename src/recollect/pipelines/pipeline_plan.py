"""`PipelinePlan`: plans of the stages of a pipeline, with what its schedule is predicted to need under them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recollect.byte_format import format_bytes
from recollect.pipelines.schedule import PipelineSchedule
from recollect.plans.plan import Plan

__all__ = ["PipelinePlan", "StagePlans"]

StagePlans = Plan | Sequence[Plan]
"""A plan for all micro-batches of a stage, or one for each of them."""


@dataclass(frozen=True, repr=False)
class PipelinePlan:
    """Plans for the stages of a pipeline, with what the schedule is predicted to need under them.

    Attributes:
        plans: one for each stage; apply each to its stage. Under `predict_pipeline` with a plan for each micro-batch, tuples.
        peaks_bytes: the most bytes that each rank holds.
        step_s: seconds from the first forward to the last backward.
        plain_step_s: the same without recompute.
        slowdowns: of each stage, what recompute adds to its own work, micro-batches on average; 0.03 is 3 %.
        in_flight: of each stage, the most micro-batches between forward and the end of backward.
        schedule: what each rank runs.
        budget_bytes: of each device; None if the plans were given.
    """

    plans: tuple[Plan | tuple[Plan, ...], ...]
    peaks_bytes: tuple[int, ...]
    step_s: float
    plain_step_s: float
    slowdowns: tuple[float, ...]
    in_flight: tuple[int, ...]
    schedule: PipelineSchedule
    budget_bytes: int | None = None

    @property
    def peak_bytes(self) -> int:
        """Bytes of the rank that needs most."""
        return max(self.peaks_bytes)

    @property
    def slowdown(self) -> float:
        """What recompute adds to the step; 0.03 is 3 %."""
        return self.step_s / self.plain_step_s - 1 if self.plain_step_s > 0 else 0.0

    @property
    def loss_chunks(self) -> int:
        """Chunks in which the last stage computes the loss, the same for all micro-batches."""
        last = self.plans[-1]
        return (last if isinstance(last, Plan) else last[0]).loss_chunks

    def __repr__(self) -> str:
        budget = "" if self.budget_bytes is None else f"budget {format_bytes(self.budget_bytes)} a device, "
        chunks = f", loss in {self.loss_chunks} chunks" if self.loss_chunks > 1 else ""
        lines = [
            f"{budget}peak {format_bytes(self.peak_bytes)}, step {self.slowdown:+.1%}{chunks}",
            f"{'rank':>4}  {'peak':>10}  {'stage':>5}  {'in flight':>9}  {'recompute':>9}",
        ]
        for rank, nbytes in enumerate(self.peaks_bytes):
            for number, stage in enumerate(self.schedule.stages_of(rank)):
                whole = f"{rank:>4}  {format_bytes(nbytes):>10}" if number == 0 else " " * 16
                lines.append(f"{whole}  {stage:>5}  {self.in_flight[stage]:>9}  {self.slowdowns[stage]:>+9.1%}")
        return "\n".join(lines)
