"""The overhead of Python and PyTorch around the ops of a step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final

LARGE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Seconds of host time around the ops of a unit, on one machine."""

    forward_op_s: float = 0.0
    backward_op_s: float = 0.0
    """To issue an op of forward, and of backward, to a device that runs it later; 0 on a CPU."""
    unit_s: float = 0.0
    """For a call of a unit on the tape, in forward and backward."""
    module_s: float = 0.0
    """For a call of a module inside it."""
    seen_op_s: float = 0.0
    """For an op that the tape sees in forward."""
    again_op_s: float = 0.0
    """For an op that the tape runs again, beyond the op itself."""
    traced_unit_s: float = 0.0
    """For a call of a unit that runs from a trace, beyond the same ops without a plan."""
    large_op_s: float = 0.0
    """For an op that the tape sees, if its results have `LARGE_BYTES`: on a CPU they push Python out of the caches."""

    def __post_init__(self) -> None:
        for field in fields(self):
            number = getattr(self, field.name)
            if not (math.isfinite(number) and number >= 0):
                raise ValueError(f"host.{field.name}: got {number} s, expected a finite number, 0 or more")

    @property
    def has_issue_times(self) -> bool:
        """Whether a device runs ops behind the host."""
        return self.forward_op_s > 0

    def seen_s(self, result_bytes: Sequence[int]) -> float:
        """Return what an op that the tape sees takes in a unit whose ops have results of so many bytes each."""
        large = sum(min(1.0, nbytes / LARGE_BYTES) for nbytes in result_bytes) / max(1, len(result_bytes))
        return self.seen_op_s + large * self.large_op_s

    def tape_s(self, num_modules: int) -> float:
        """Return a unit's tape overhead in forward, whatever is dropped: its call, and those of the modules inside."""
        return self.unit_s + num_modules * self.module_s


@dataclass(frozen=True, slots=True)
class AroundOps:
    """The overhead around the ops of a step, and how recording slows them."""

    host: HostTimes
    recorded_s: float
    """Seconds by which an op takes longer while it is recorded."""


NOTHING = AroundOps(HostTimes(), 0.0)
