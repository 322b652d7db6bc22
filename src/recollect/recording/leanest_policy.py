"""The leanest policy that keeps every unit's output."""

from __future__ import annotations

from recollect.plans.action import Action

__all__ = ["DropAll"]


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
