"""The processes that torchrun started, as each finds them in its environment. Imports no torch."""

from __future__ import annotations

import os

__all__ = ["is_first_launched", "num_launched"]

# What torchrun tells each process, for `init_process_group`.
_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def num_launched() -> int:
    """How many processes torchrun started with this one; 1 without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in _VARIABLES) else 1


def is_first_launched() -> bool:
    """Whether this is the only process, or the one of those started by torchrun that prints."""
    return num_launched() == 1 or os.environ["RANK"] == "0"
