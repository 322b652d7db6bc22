"""What stands in place of the forwards of a model that `attach` watches: the watch itself, below it a plan or a recorder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Final

import torch
from torch import nn

from recollect._torch_private import num_dispatch_modes, profiler_is_active
from recollect.applying import apply_own, apply_policy
from recollect.attaching.entries import EntryForward, Watcher
from recollect.attaching.planned_step import PlannedStep
from recollect.attaching.unit_watch import UnitWatch
from recollect.byte_format import format_bytes
from recollect.engine.placed_forward import Applied
from recollect.engine.policy import DropAll, leanest_policy
from recollect.plans.unit_plan import UnitPlan
from recollect.recording.next_step import entry_modules
from recollect.recording.step_recording import StepRecording


class Placement:
    """Puts forwards in place, and takes them off.

    Args:
        model: that is watched.
        unit_paths: of its units.
        watcher: told of the model's calls.
        departs: see `UnitWatch`.

    Attributes:
        model: that is watched.
        unit_paths: of the units.
        units: watches them.
        active: the step whose plan is in place.

    Raises:
        AlreadyAppliedError: the model recomputes already.
    """

    def __init__(
        self, model: nn.Module, unit_paths: Sequence[str], watcher: Watcher, departs: Callable[[str], None]
    ) -> None:
        apply_policy(model, unit_paths, DropAll()).remove()  # Only to look whether it can be.
        self.unit_paths = list(unit_paths)
        self.active: PlannedStep | None = None
        self.model = model
        self._applied: Applied | None = None
        self.units = UnitWatch(model, unit_paths, departs)
        entries = [EntryForward(entry, path, watcher) for path, entry in entry_modules(model, unit_paths).items()]
        self._watching = Applied(model, [*self.units.units, *entries], None)

    def suspended(self) -> AbstractContextManager[None]:
        """Take the watch off for the duration of a with-block, in which plans are put below it."""
        return self._watching.suspended()

    def put(self, chosen: PlannedStep | None) -> None:
        """Put the plan of a step in place, or nothing."""
        if chosen is None or chosen is not self.active:
            self._replace(None if chosen is None else lambda: apply_own(self.model, chosen.plan))
        self.active = chosen

    def put_leanest(self, lean_units: Mapping[str, UnitPlan] | None) -> None:
        """Put in place what drops all but what a plan keeps by name."""
        self._replace(lambda: apply_policy(self.model, self.unit_paths, leanest_policy(lean_units)))
        self.active = None

    def remove(self) -> None:
        """Take everything off."""
        self.put(None)
        self._watching.remove()

    def _replace(self, make: Callable[[], Applied] | None) -> None:
        with self.suspended():
            if self._applied is not None:
                self._applied.remove()
            self._applied = None if make is None else make()


# What the recording itself copies of small inputs: much beside the step of a toy, and nothing beside any other.
_OWN_BYTES: Final = 32 << 10


def obstacle(device: torch.device) -> str:
    """Return what keeps a step from being recorded now, in words; "" if nothing does."""
    if profiler_is_active() and device.type == "cpu":
        return "a profiler is active, beside which a step cannot be recorded: running at the leanest until it ends"
    if num_dispatch_modes():
        return "a dispatch mode is active around the model: running at the leanest until it ends"
    return ""


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
