"""Finds which calls of the units backward still needs, at each stretch of a step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from recollect.profile.events import BACKWARD, OP, PEEK, SAVE, USE
from recollect.profile.profile import Profile
from recollect.simulation.windows import Window

__all__ = ["alive_calls", "calls_besides", "most_alive", "num_alive"]


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
    if len(profile.calls) == len(units) and _num_backwards(windows) <= 1:
        return None
    counts = num_alive(profile, windows, units)
    counts -= np.arange(len(units)) < np.array(places)[:, None]
    return counts if counts.any() else None


def _num_backwards(windows: Sequence[Window]) -> int:
    """Return how many times backward begins."""
    phases = [None, *(window.phase for window in windows)]
    return sum(after == BACKWARD != before for before, after in pairwise(phases))


def most_alive(profile: Profile, windows: Sequence[Window]) -> dict[str, int]:
    """Return for each path of a unit how many of its calls wait for backward at once, at most; 1 if none ever does."""
    alive = alive_calls(profile, windows)
    # The call that a window belongs to is alive in it.
    for number, window in enumerate(windows):
        if window.call >= 0:
            alive[number, window.call] = True
    return {p: max(1, int(alive[:, calls].sum(axis=1).max(initial=0))) for p, calls in profile.calls_by_path.items()}
