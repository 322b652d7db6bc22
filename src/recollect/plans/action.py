"""What can happen to a value between forward and backward."""

from __future__ import annotations

from enum import Enum

__all__ = ["Action"]


class Action(str, Enum):
    """What happens to one value. A choice says "value -> action", and what it does not name is kept.

    Each is also its word, the one that plans have in JSON and people may pass.

    Attributes:
        KEEP: stays in memory for as long as something needs it.
        RECOMPUTE: is dropped in forward, and computed again when backward asks for it.

    Example:
        >>> Action("recompute") is Action.RECOMPUTE, Action.KEEP == "keep", str(Action.KEEP)
        (True, True, 'keep')
    """

    KEEP = "keep"
    RECOMPUTE = "recompute"

    def __str__(self) -> str:
        return self.value
