"""The rule that a tape follows: what happens to each value between forward and backward."""

from __future__ import annotations

from typing import Protocol

from recollect.plans.action import Action

__all__ = ["Policy"]


class Policy(Protocol):
    """Says what happens to values. Asked once for each name; the answer holds for every later call."""

    def action(self, unit_path: str, value_name: str) -> Action:
        """Return what happens to a value between forward and backward."""
        ...

    def acts_in(self, unit_path: str, module_path: str) -> bool:
        """Whether anything that a module of the unit itself computes may not be kept; if all is, its ops need not be seen."""
        ...

    def output_action(self, unit_path: str) -> Action:
        """Return what happens to what the unit returns: if dropped, the next unit's backward computes it again."""
        ...
