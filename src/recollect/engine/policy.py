"""Defines the `Policy` protocol, which tells the tape what happens to each value between forward and backward."""

from __future__ import annotations

from typing import Protocol

from recollect.plans.action import Action

__all__ = ["Policy"]


class Policy(Protocol):
    """Decides what happens to values. Asked once for each name; the answer holds for all later calls."""

    def action(self, unit_path: str, value_name: str) -> Action:
        """Return what happens to a value between forward and backward."""
        ...

    def acts_in(self, unit_path: str, module_path: str) -> bool:
        """Whether any value that this module itself computes may be dropped; if none, its ops need not be seen."""
        ...

    def output_action(self, unit_path: str) -> Action:
        """Return what happens to the unit's output: if dropped, the next unit's backward computes it again."""
        ...
