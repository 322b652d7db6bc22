"""A plan as the tape's policy, with one warning where the model does not run what the plan was made for."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

from recollect.errors import PlanMismatchWarning
from recollect.plans.action import Action
from recollect.plans.value_names import module_of

if TYPE_CHECKING:
    from recollect.plans.unit_plan import UnitPlan


class PlanPolicy:
    """Looks values up in the plans of units; keeps what it does not know.

    A loop inside a module (experts that got tokens) may run an op more or fewer times than when the plan was made: a call
    that the plan does not name follows the plan's calls of the same op in the same module, if those agree.
    """

    def __init__(self, units: Mapping[str, UnitPlan]) -> None:
        self._units = units
        self._by_stem: dict[tuple[str, str], set[str]] = {}
        self._dropping = {
            (path, module_of(name))
            for path, unit in units.items()
            for name, action in unit.actions.items()
            if action == Action.RECOMPUTE
        }
        for path, unit in units.items():
            for name, action in unit.actions.items():
                self._by_stem.setdefault((path, _without_count(name)), set()).add(action)
        self._has_warned = False

    def drops(self, unit_path: str, value_name: str) -> bool:
        """Whether the plan drops this value."""
        unit = self._units.get(unit_path)
        if unit is None:
            return False
        action = unit.actions.get(value_name)
        if action is not None:
            return action == Action.RECOMPUTE
        alike = self._by_stem.get((unit_path, _without_count(value_name)))
        if alike is not None and len(alike) == 1:
            return Action.RECOMPUTE in alike
        self._warn(unit_path, value_name)
        return False

    def drops_in(self, unit_path: str, module_path: str) -> bool:
        """Whether the plan drops any value of a module."""
        return (unit_path, module_path) in self._dropping

    def drops_output(self, unit_path: str) -> bool:
        """Whether the plan drops what this unit returns."""
        unit = self._units.get(unit_path)
        return unit is not None and unit.output == Action.RECOMPUTE

    def _warn(self, unit_path: str, value_name: str) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"the plan does not fit this model: unit {unit_path!r} computes {value_name!r}, which the plan does not name. "
            "That value and all others that the plan does not name are kept, so the step is exact but may need more "
            "memory than predicted. Record the model again and make a new plan.",
            PlanMismatchWarning,
            stacklevel=2,
        )


def _without_count(name: str) -> str:
    """Drop the "#2" of a repeated call: "mlp.mm#2.1" becomes "mlp.mm.1"."""
    stem, mark, rest = name.partition("#")
    if not mark:
        return name
    _, dot, output = rest.partition(".")
    return stem + dot + output
