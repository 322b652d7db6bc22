"""How often to time a kind of unit on a copy: long ones once or twice, short ones often, some not at all.

Seconds that a round costs are seconds that the user waits. The tape's overhead is the same for each op, however long the op
takes. In a unit of a millisecond it is much of the time, and many rounds tell it from noise; in a unit of a tenth of a second
it is less than the rounds differ by, and more of them would not help.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["TOGETHER", "Rounds", "rounds_for"]

# A kind of unit may take this long, however short the step is.
_FREE_S: Final = 0.25
# Seconds of a round for each second of the unit: plainly and on the leanest tape, with its recompute; on the idle tape.
_ROUND: Final = 2.4
_IDLE: Final = 1.0
# A median of three is not decided by one page fault.
_FEWEST_IF_SHORT: Final = 3
_MOST_IF_SHORT: Final = 7
_MOST_IF_LONG: Final = 2
# The tape's overhead for one op, at most, and the part of a unit's time that does not count.
_OVERHEAD_S: Final = 1e-4
_NEGLIGIBLE: Final = 0.02


@dataclass(frozen=True, slots=True)
class Rounds:
    """How often a unit runs.

    Attributes:
        number: of rounds that count, plainly and on the leanest tape; 0 if its ops' times say all.
        warms_up: a round before them does not count.
        has_idle: it runs on an idle tape, too.
    """

    number: int
    warms_up: bool
    has_idle: bool


# A fixed number where several processes train together, since all must run equally many: units may wait for each other in
# collectives.
TOGETHER: Final = Rounds(_FEWEST_IF_SHORT, warms_up=True, has_idle=True)


def rounds_for(unit_s: float, *, num_ops: int, num_calls: int, allocates: bool = False) -> Rounds:
    """Return how often to time a kind of unit.

    Args:
        unit_s: about how long forward and backward of one call take, by the times of their ops.
        num_ops: how many ops the tape sees in forward.
        num_calls: how many calls of this kind a step has.
        allocates: the device's first run takes longer than any other, since it allocates memory that is then reused.

    Example:
        >>> rounds_for(0.001, num_ops=40, num_calls=12)
        Rounds(number=7, warms_up=True, has_idle=True)
        >>> rounds_for(0.2, num_ops=40, num_calls=12)
        Rounds(number=2, warms_up=False, has_idle=False)
    """
    num_short = int(_FREE_S / ((_ROUND + _IDLE) * unit_s)) - 1 if unit_s > 0 else _MOST_IF_SHORT
    if num_short >= _FEWEST_IF_SHORT:
        return Rounds(min(num_short, _MOST_IF_SHORT), warms_up=True, has_idle=True)
    if num_calls == 1 and num_ops * _OVERHEAD_S <= _NEGLIGIBLE * unit_s:
        return Rounds(0, warms_up=False, has_idle=False)
    # Two rounds of a kind with six calls take about as long as its part of the step.
    allowed_s = max(_FREE_S, num_calls * unit_s)
    number = max(1, min(_MOST_IF_LONG, int(allowed_s / (_ROUND * unit_s))))
    return Rounds(number, warms_up=allocates, has_idle=False)
