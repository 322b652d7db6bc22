"""Begin to record a step in the middle of somebody else's loop, and say what stands in the way, and what it took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from recollect._torch_private import num_dispatch_modes, profiler_is_active
from recollect.attaching.placement import Placement
from recollect.attaching.planned_step import PlannedStep
from recollect.byte_format import format_bytes
from recollect.costs.op_costs import MeasuredCosts
from recollect.plans.unit_plan import UnitPlan
from recollect.recording.find_units import Unit
from recollect.recording.model_step import step_tensors
from recollect.recording.step_recording import StepRecording

# What the recording itself copies of small inputs: much beside the step of a toy, and nothing beside any other.
_OWN_BYTES: Final = 32 << 10


def obstacle(device: torch.device) -> str:
    """Return what keeps a step from being recorded now, in words; "" if nothing does."""
    if profiler_is_active() and device.type == "cpu":
        return "a profiler is active, beside which a step cannot be recorded: running at the leanest until it ends"
    if num_dispatch_modes():
        return "a dispatch mode is active around the model: running at the leanest until it ends"
    return ""


def begin_recording(
    placement: Placement,
    units: Sequence[Unit],
    optimizers: Sequence[torch.optim.Optimizer],
    device: torch.device,
    *,
    parameters: Sequence[torch.Tensor],
    lean_units: Mapping[str, UnitPlan] | None,
    replays_collectives: bool,
) -> StepRecording:
    """Begin to record the step whose first call is about to run.

    Args:
        placement: of what watches the model; the recorder goes below it.
        units: of the model.
        optimizers: that train it.
        device: where it runs.
        parameters: of the model.
        lean_units: see `StepRecording`.
        replays_collectives: see `StepRecording`.
    """
    tensors = step_tensors(placement.model, None, optimizers, parameters=parameters)
    gradients = tensors.pop("gradients")
    recording = StepRecording(
        placement.model,
        units,
        MeasuredCosts(device, looks_around=True),
        device,
        counts_all_tensors=True,
        replays_collectives=replays_collectives,
        sees_calls=False,
        lean_units=lean_units,
    )
    with placement.suspended():
        recording.start(tensors, gradients=gradients)
    return recording


def excess_of(recording: StepRecording, planned: PlannedStep) -> str:
    """Return what to say of a step that needed more than the budget while it was recorded; "" if it did not.

    Args:
        recording: that has ended.
        planned: the step.
    """
    peak_bytes = recording.peak_bytes
    if peak_bytes <= planned.budget_bytes + _OWN_BYTES:
        return ""
    return (
        f"while it was recorded, a step of {planned.calls[0]} needed {format_bytes(peak_bytes)}, "
        f"{format_bytes(peak_bytes - planned.budget_bytes)} more than the budget of {format_bytes(planned.budget_bytes)}, as "
        f"nothing leaner was known for it; from now on steps like it need {format_bytes(planned.peak_bytes)}"
    )
