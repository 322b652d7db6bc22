"""Defines the actions: what can happen to a value between forward and backward."""

from __future__ import annotations

from enum import Enum


class Action(str, Enum):
    """What happens to one value. A plan maps values to actions and keeps what it does not name.

    Each action equals its word, which plans use in JSON and people may pass in its place.

    Attributes:
        KEEP: the value stays in memory for as long as something needs it.
        RECOMPUTE: the value is dropped in forward and computed again when backward asks for it.
        SHARD: each rank of a group keeps a part of the value, which is the same on all of them; it is gathered when backward
            asks for it. See `recollect.distribute_saved_activations`.
        OFFLOAD: the value is copied to host memory and leaves the device; it is copied back before backward asks for it.

    Example:
        >>> Action("recompute") is Action.RECOMPUTE, Action.KEEP == "keep", str(Action.KEEP)
        (True, True, 'keep')
    """

    KEEP = "keep"
    RECOMPUTE = "recompute"
    SHARD = "shard"
    OFFLOAD = "offload"

    def __str__(self) -> str:
        return self.value


OUTPUT_ACTIONS = (Action.KEEP, Action.RECOMPUTE)
"""What can happen to what a unit returns; it is kept as a part, or offloaded, if its value's own action says so."""
