"""Reduce a step's memory over time to a few hundred points for drawing, without losing a peak."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from recollect.profile.events import OPTIMIZER
from recollect.simulation.timeline import PHASES, Timeline

TimeUnit: TypeAlias = tuple[float, str]
"""Seconds in one unit, and its name."""

# The optimizer's ops are not timed; its step gets this fraction of the width.
_OPTIMIZER_FRACTION = 0.05


@dataclass(frozen=True, slots=True)
class Span:
    """A named interval of the time axis."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, eq=False)
class MemoryCurve:
    """Intervals of equal length, each with its moment of most bytes; positions are in the unit of the time axis."""

    start: NDArray[np.float64]
    end: float
    moments: NDArray[np.int64]
    """For each interval, the moment (index in the timeline) with most bytes alive."""
    peak_at: float
    phases: tuple[Span, ...]
    """Forward, loss, backward, optimizer step."""
    units: tuple[Span, ...]
    """Paths of the units in the order they run; "" outside of units."""
    axis: str


def memory_curve(timeline: Timeline, *, num_points: int, time_unit: TimeUnit) -> MemoryCurve:
    at, axis = positions(timeline, time_unit)
    end = float(at[-1])
    edges = np.linspace(0.0, end, num_points + 1)
    first = np.searchsorted(at, edges, side="left")
    total = timeline.total_bytes
    # Bytes alive just before an interval are alive at its start; the last interval includes its end.
    starts = np.maximum(first[:-1] - 1, 0)
    ends = np.append(first[1:-1], len(at))
    moments = [
        int(start + np.argmax(total[start : max(end, start + 1)])) for start, end in zip(starts, ends, strict=True)
    ]
    return MemoryCurve(
        start=edges[:-1],
        end=end,
        moments=np.array(moments),
        peak_at=float(at[timeline.peak]),
        phases=spans(at.tolist(), [PHASES[phase] for phase in timeline.phases.tolist()]),
        units=spans(at.tolist(), [timeline.paths[call] if call >= 0 else "" for call in timeline.calls.tolist()]),
        axis=axis,
    )


def positions(timeline: Timeline, time_unit: TimeUnit) -> tuple[NDArray[np.float64], str]:
    unit_s, unit = time_unit
    at = timeline.time_s / unit_s
    if at[-1] <= 0:
        return np.arange(1, len(at) + 1, dtype=np.float64), "events of the step (no times are known)"
    axis = f"predicted time ({unit})"
    is_optimizer = timeline.phases == OPTIMIZER
    if np.count_nonzero(is_optimizer) > 1:
        # All moments of an optimizer step have the same time: spread them, and shift later ones.
        gaps = is_optimizer & np.concatenate(([False], is_optimizer[:-1]))
        at += np.cumsum(gaps) * (_OPTIMIZER_FRACTION * at[-1] / max(1, np.count_nonzero(gaps)))
        axis += "; the optimizer step is not to scale"
    return at, axis


def spans(at: Sequence[float], names: Sequence[str]) -> tuple[Span, ...]:
    """Return the intervals of moments in a row that have one name, each up to the next; those without length are left out."""
    found: list[Span] = []
    position = 0
    for name, group in itertools.groupby(names):
        start, position = position, position + len(list(group))
        until = at[min(position, len(at) - 1)]
        if until > at[start]:
            found.append(Span(name, at[start], until))
    return tuple(found)
