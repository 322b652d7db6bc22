"""Defines the actions: what can happen to a value between forward and backward."""

from __future__ import annotations

from enum import Enum

__all__ = ["Action"]


class Action(str, Enum):
    """What happens to one value. A plan maps values to actions and keeps what it does not name.

    Each action equals its word, which plans use in JSON and people may pass in its place.

    Attributes:
        KEEP: the value stays in memory for as long as something needs it.
        RECOMPUTE: the value is dropped in forward and computed again when backward asks for it.

    Example:
        >>> Action("recompute") is Action.RECOMPUTE, Action.KEEP == "keep", str(Action.KEEP)
        (True, True, 'keep')
    """

    KEEP = "keep"
    RECOMPUTE = "recompute"

    def __str__(self) -> str:
        return self.value
