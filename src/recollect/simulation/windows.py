"""Splits a step into windows, each in the forward or the backward of one unit call, and finds which calls are alive in each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from recollect.profile.events import BACKWARD, FORWARD, OP, PEEK, PHASE, SAVE, USE, StepLog
from recollect.profile.profile import Profile


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


def alive_calls(profile: Profile, windows: Sequence[Window]) -> NDArray[np.bool_]:
    """Return for each window and call whether the call ran before and backward has yet to use what it made or saved.

    The call that a window belongs to is left out of it.

    Complexity: one pass over the events, then windows times calls.
    """
    num_calls = len(profile.calls)
    began = np.full(num_calls, np.iinfo(np.int64).max)
    needed = np.full(num_calls, -1)
    callers: dict[int, tuple[int, int]] = {}
    for position, (code, first, *rest) in enumerate(profile.log.events()):
        if code == OP:
            began[first] = min(began[first], position)
        elif code == SAVE:
            callers[rest[1]] = first, rest[2]
        elif code in (PEEK, USE) and first in callers:
            needed[list(callers[first])] = position
    starts = np.array([window.start for window in windows], dtype=np.int64)[:, None]
    own = np.array([window.call for window in windows], dtype=np.int64)[:, None]
    alive: NDArray[np.bool_] = (began < starts) & (starts <= needed) & (own != np.arange(num_calls))
    return alive


def num_alive(profile: Profile, windows: Sequence[Window], units: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    """Return for each window and unit how many of its calls are alive, as `alive_calls` says.

    A call that saves less than the largest of its unit counts as that part of one.

    Args:
        profile: the recorded step.
        windows: the windows of this profile.
        units: the calls of each unit.
    """
    alive = alive_calls(profile, windows)
    saved_bytes = [profile.graph_of(call).saved_bytes for call in profile.calls]
    counts = np.zeros((len(windows), len(units)))
    for unit, calls in enumerate(units):
        most = max(saved_bytes[call] for call in calls)
        parts = np.array([saved_bytes[call] / most if most else 1.0 for call in calls])
        counts[:, unit] = alive[:, list(calls)] @ parts
    return counts


def calls_besides(
    profile: Profile, windows: Sequence[Window], units: Sequence[Sequence[int]], places: Sequence[int]
) -> NDArray[np.float64] | None:
    """Return `num_alive`, less one for each unit before the window's own.

    Args:
        profile: the recorded step.
        windows: the windows of this profile.
        units: the calls of each unit, in the order of their first calls.
        places: for each window, which unit it belongs to; -1 if none.

    Returns:
        None if that is 0 everywhere: all units run once, and one backward takes them in reverse.
    """
    phases = [None, *(window.phase for window in windows)]
    num_backwards = sum(after == BACKWARD != before for before, after in pairwise(phases))
    if len(profile.calls) == len(units) and num_backwards <= 1:
        return None
    counts = num_alive(profile, windows, units)
    counts -= np.arange(len(units)) < np.array(places)[:, None]
    return counts if counts.any() else None


def most_alive(profile: Profile, windows: Sequence[Window]) -> dict[str, int]:
    """Return for each path of a unit how many of its calls wait for backward at once, at most; 1 if none ever does."""
    alive = alive_calls(profile, windows)
    # The call that a window belongs to is alive in it.
    for number, window in enumerate(windows):
        if window.call >= 0:
            alive[number, window.call] = True
    return {p: max(1, int(alive[:, calls].sum(axis=1).max(initial=0))) for p, calls in profile.calls_by_path.items()}
