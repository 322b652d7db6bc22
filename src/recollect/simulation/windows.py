"""The stretches of a step that belong to one unit call: its forward, and its backward."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from recollect.profile.events import FORWARD, OP, PHASE, SAVE, USE
from recollect.profile.graph import Profile

__all__ = ["Window", "windows"]


@dataclass(frozen=True, slots=True)
class Window:
    """The events from `start` (a position in the log) to the next window: the work of one unit call in one phase.

    In backward, that is the last call that saved something for which backward still asks; what earlier calls saved can be
    asked for meanwhile. What runs outside of the units, such as the loss, belongs to the call before it; `call` is -1
    before the first one.
    """

    start: int
    phase: int
    call: int


def windows(profile: Profile) -> list[Window]:
    """Return the windows of a step in order; the first starts at 0.

    Complexity: two walks over the events.
    """
    events = [event for block, _ in profile.log.sequence for event in profile.log.blocks[block]]
    last_use = {event[1]: position for position, event in enumerate(events) if event[0] == USE}
    saver: dict[int, int] = {}
    num_waiting: Counter[int] = Counter()
    phase, call = FORWARD, -1
    found = [Window(0, phase, call)]
    for position, event in enumerate(events):
        code = event[0]
        if code == PHASE:
            phase = event[1]
        elif code == OP:
            call = event[1]
        elif code == SAVE and event[3] in last_use:
            saver[event[3]] = event[4]
            num_waiting[event[4]] += 1
        elif code == USE and event[1] in saver:
            call = max(num_waiting)
            if last_use[event[1]] == position:
                num_waiting[saver[event[1]]] -= 1
                # Drops what is no longer asked for.
                num_waiting = +num_waiting if num_waiting[saver[event[1]]] == 0 else num_waiting
        if (phase, call) != (found[-1].phase, found[-1].call):
            # No window is empty.
            if found[-1].start == position:
                found.pop()
            found.append(Window(position, phase, call))
    return found
