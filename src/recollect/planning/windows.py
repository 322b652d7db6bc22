"""The stretches of a step that belong to one unit call: its forward, and its backward."""

from __future__ import annotations

from dataclasses import dataclass

from recollect.profile.events import OP, PHASE, SAVE, USE
from recollect.profile.graph import Profile

__all__ = ["Window", "windows"]


@dataclass(frozen=True, slots=True)
class Window:
    """The events from `start` (a position in the log) to the next window: the work of one unit call in one phase.

    What runs outside of the units, such as the loss, belongs to the call before it; `call` is -1 before the first one.
    """

    start: int
    phase: int
    call: int


def windows(profile: Profile) -> list[Window]:
    """Return the windows of a step in order; the first starts at 0.

    Complexity: one walk over the events.
    """
    saver: dict[int, int] = {}
    phase, call = 0, -1
    found = [Window(0, phase, call)]
    position = 0
    for block, _ in profile.log.sequence:
        for event in profile.log.blocks[block]:
            code = event[0]
            if code == PHASE:
                phase = event[1]
            elif code == OP:
                call = event[1]
            elif code == SAVE:
                saver[event[3]] = event[1]
            elif code == USE:
                call = saver[event[1]]
            if (phase, call) != (found[-1].phase, found[-1].call):
                found.append(Window(position, phase, call))
            position += 1
    return found
