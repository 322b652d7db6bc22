"""What stands in place of the forwards of a model that `attach` watches: the watch itself, and below it a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from torch import nn

from recollect.applying import apply_own, apply_policy
from recollect.attaching.entries import Watcher, entry_forwards
from recollect.attaching.planned_step import PlannedStep
from recollect.attaching.unit_watch import UnitWatch
from recollect.engine.placed_forward import Applied
from recollect.engine.policy import DropAll, leanest_policy
from recollect.plans.unit_plan import UnitPlan


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
        self._watching = Applied(model, [*self.units.units, *entry_forwards(model, unit_paths, watcher)], None)

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
