"""The rule that a tape follows: which values are dropped in forward and computed again in backward."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Decision", "Policy"]

Decision = bool | tuple[bool, ...]
"""Whether the results of an op are dropped: all alike, or one by one."""


class Policy(Protocol):
    """Decides which values are dropped. Asked once for each name; the answer holds for every later call."""

    def drops(self, unit_path: str, value_name: str) -> bool:
        """Whether a value is dropped in forward and computed again in backward."""
        ...

    def drops_in(self, unit_path: str, module_path: str) -> bool:
        """Whether it may drop anything that a module of the unit itself computes; if not, its ops need not be seen."""
        ...

    def drops_output(self, unit_path: str) -> bool:
        """Whether what the unit returns may be dropped too, so that the next unit's backward computes it again."""
        ...
