"""The leanest policies: one that needs to know nothing of the model, and one that follows a plan for another step of it."""

from __future__ import annotations

from collections.abc import Mapping

from recollect.engine.policy import Policy
from recollect.plans.action import Action
from recollect.plans.unit_plan import UnitPlan

__all__ = ["DropAll", "LeanPlan", "leanest_policy"]


class DropAll:
    """Drops every value that can be dropped, but no unit's output."""

    def action(self, unit_path: str, value_name: str) -> Action:
        """Drop every value."""
        return Action.RECOMPUTE

    def acts_in(self, unit_path: str, module_path: str) -> bool:
        """Drop values of every module."""
        return True

    def output_action(self, unit_path: str) -> Action:
        """Keep every unit's output."""
        return Action.KEEP


class LeanPlan:
    """Keeps of each unit what a plan keeps by name, and drops all else; a unit that the plan does not name keeps everything.

    Args:
        units: the plan, of a step like the one that will run.
    """

    def __init__(self, units: Mapping[str, UnitPlan]) -> None:
        self._units = units

    def action(self, unit_path: str, value_name: str) -> Action:
        """Drop the value, unless the plan keeps it."""
        unit = self._units.get(unit_path)
        is_kept = unit is None or unit.actions.get(value_name) is Action.KEEP
        return Action.KEEP if is_kept else Action.RECOMPUTE

    def acts_in(self, unit_path: str, module_path: str) -> bool:
        """Drop values of every module of a unit that the plan names."""
        return unit_path in self._units

    def output_action(self, unit_path: str) -> Action:
        """Drop a unit's output if the plan does."""
        unit = self._units.get(unit_path)
        return Action.KEEP if unit is None else unit.output


def leanest_policy(units: Mapping[str, UnitPlan] | None) -> Policy:
    """Return the policy that follows a plan; without one, what drops all but outputs."""
    return DropAll() if units is None else LeanPlan(units)
