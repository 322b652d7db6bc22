"""Splits a step into windows: stretches that each belong to the forward or the backward of one unit call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from recollect.profile.events import FORWARD, OP, PEEK, PHASE, SAVE, USE, StepLog
from recollect.profile.profile import Profile

__all__ = ["Window", "windows"]


@dataclass(frozen=True, slots=True)
class Window:
    """The events from `start` (a position in the log) to the next window: the work of one unit call in one phase.

    In backward, that call is the last one with saved values that this backward has yet to use; meanwhile it may also use
    what earlier calls saved. What runs outside the units, such as the loss, belongs to the call before it; `call` is -1
    before the first call.
    """

    start: int
    phase: int
    call: int


def windows(profile: Profile) -> list[Window]:
    """Return the windows of a step in order; the first starts at 0.

    Complexity: two passes over the events.
    """
    scan = _Scan(profile.log)
    handlers: dict[int, Callable[..., None]] = {PHASE: scan.begin_phase, OP: scan.op, SAVE: scan.save}
    handlers |= {USE: scan.use, PEEK: scan.use}
    found = [Window(0, scan.phase, scan.call)]
    for position, _ in enumerate(profile.log.play(handlers)):
        if (scan.phase, scan.call) != (found[-1].phase, found[-1].call):
            # Drop a window that would be empty.
            if found[-1].start == position:
                found.pop()
            found.append(Window(position, scan.phase, scan.call))
    return found


class _Scan:
    """Tracks which call runs in forward, and which one backward is in."""

    def __init__(self, log: StepLog) -> None:
        self.phase = FORWARD
        self.call = -1
        self._uses = iter(_uses_by_phase(log))
        # Of the handles that are saved and not yet used to the end: who saved them, and the uses left in this phase.
        self._saver: dict[int, int] = {}
        self._uses_left = next(self._uses)
        # How many saved values of each call this phase has yet to use.
        self._num_waiting: Counter[int] = Counter()

    def begin_phase(self, phase: int) -> None:
        self.phase = phase
        self._uses_left = next(self._uses)
        self._num_waiting = Counter(self._saver[handle] for handle in self._uses_left if handle in self._saver)

    def op(self, call: int, _op: int) -> None:
        self.call = call

    def save(self, _call: int, _value: int, handle: int, saver: int) -> None:
        self._saver[handle] = saver
        if self._uses_left[handle]:
            self._num_waiting[saver] += 1

    def use(self, handle: int) -> None:
        if handle not in self._saver:
            return
        self.call = max(self._num_waiting)
        self._uses_left[handle] -= 1
        if not self._uses_left[handle]:
            saver = self._saver[handle]
            self._num_waiting[saver] -= 1
            if not self._num_waiting[saver]:
                del self._num_waiting[saver]


def _uses_by_phase(log: StepLog) -> list[Counter[int]]:
    """Return how often each handle is used before the first phase begins, and in each phase."""
    found: list[Counter[int]] = [Counter()]
    for code, number, *_ in log.events():
        if code == PHASE:
            found.append(Counter())
        elif code in (PEEK, USE):
            found[-1][number] += 1
    return found
