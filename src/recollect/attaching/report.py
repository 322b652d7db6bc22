"""Say in words what `attach` did."""

from __future__ import annotations

from collections.abc import Sequence

from recollect.attaching.planned_step import PlannedStep
from recollect.byte_format import format_bytes

_NOT_COUNTED = (
    "not counted: evaluation and generation; what other threads, processes and libraries allocate without PyTorch; "
    "on the CPU also shared memory and mapped files"
)


def line_of(planned: PlannedStep, seconds: float) -> str:
    """Return the line that says what was planned.

    Args:
        planned: the step.
        seconds: that planning took.
    """
    slowdown, host_bytes = planned.plan.predicted_slowdown or 0.0, planned.plan.predicted_host_bytes
    host = f"host memory {format_bytes(host_bytes)}, " if host_bytes else ""
    return (
        f"recollect: {format_bytes(planned.budget_bytes)} budget, peak {format_bytes(planned.peak_bytes)}, {host}"
        f"{slowdown:+.1%} (full recompute: {planned.full_slowdown:+.0%}), planned for {planned.calls[0]} in {seconds:.1f} s"
    )


def numbers_of(planned: PlannedStep) -> dict[str, float]:
    """Return the numbers of that line, under names for the loggers of trainers."""
    return {
        "memory_budget_bytes": planned.budget_bytes,
        "predicted_peak_bytes": planned.peak_bytes,
        "predicted_slowdown": planned.plan.predicted_slowdown or 0.0,
    }


def report_of(
    planned: Sequence[PlannedStep], budget_bytes: int | None, num_steps: int, recorded_steps: Sequence[int]
) -> str:
    """Return a report of some lines."""
    if budget_bytes is None:
        return "recollect: no step was recorded yet; the first one ends with the optimizer's step"
    lines = [f"{format_bytes(budget_bytes)} budget, {num_steps} steps, {len(recorded_steps)} of them recorded"]
    for step in planned:
        calls = f" and {len(step.calls) - 1} more calls" if len(step.calls) > 1 else ""
        lines.append(
            f"{step.calls[0]}{calls}: peak {format_bytes(step.peak_bytes)} ({format_bytes(step.plain_peak_bytes)} without "
            f"recompute), {step.plan.predicted_slowdown or 0.0:+.1%}"
        )
    last = planned[-1].profile
    counted = ", ".join(f"{kind.replace('_', ' ')} {format_bytes(n)}" for kind, n in last.persistent.items() if n)
    return "\n".join([*lines, f"counted throughout: {counted}", _NOT_COUNTED])
