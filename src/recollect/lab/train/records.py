"""Records of a run: one per step, the baseline without recompute, and the outcome."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step.

    Attributes:
        step: steps completed, including this one.
        loss: mean cross entropy of the step's tokens, in nats.
        learning_rate: learning rate of this step.
        grad_norm: norm of the gradient before clipping; nan if clipping is off.
        step_s: step time in seconds; measuring the peak on a CPU adds to it.
        tokens_per_s: tokens of the step over `step_s`.
        validation_loss: validation loss after this step, if computed.
        peak_bytes: measured peak of the whole step, if measured.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    step_s: float
    tokens_per_s: float
    validation_loss: float | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The step without recompute: its predicted peak, and if requested its measured peak and fastest time."""

    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    measured_step_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A finished (or stopped) run.

    Attributes:
        records: steps of this process, oldest first; none if a finished run was resumed.
        baseline: the step without recompute.
        budget_bytes: bound on the step's peak; None without a budget.
        predicted_peak_bytes: predicted peak of the plan; None without a budget.
        predicted_slowdown: added time of the plan as a fraction of the step without recompute; None without a budget.
        step_s: fastest step without a measured peak, as other programs can only slow steps down; None if there is none.
        folder: the run folder, for messages.
        total_steps: steps requested.
        excess_reason: why a step may take more than predicted, and what to do, in words; none for one process.
    """

    records: tuple[StepRecord, ...]
    baseline: Baseline
    budget_bytes: int | None
    predicted_peak_bytes: int | None
    predicted_slowdown: float | None
    step_s: float | None
    folder: str
    total_steps: int
    excess_reason: str = ""

    @property
    def measured_peak_bytes(self) -> int | None:
        """Largest measured peak of a step, None if none was measured."""
        return max((record.peak_bytes for record in self.records if record.peak_bytes is not None), default=None)
