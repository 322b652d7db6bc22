"""What all pictures share: memory over time in a few hundred points that lose no peak, the line of the bound, units, texts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from recollect.planning.frontier import BoundPoint, Frontier, FrontierPoint
from recollect.profile.events import OPTIMIZER
from recollect.profile.profile import Profile
from recollect.simulation.timeline import PHASES, Timeline

TimeUnit: TypeAlias = tuple[float, str]
"""Seconds in one unit, and its name."""

# The optimizer's ops are not timed; its step gets this fraction of the width.
_OPTIMIZER_FRACTION = 0.05
_Point = tuple[float, float]
_GIB = 1 << 30
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Span:
    """A named interval of the time axis."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, eq=False)
class MemoryCurve:
    """Intervals of equal length, each with its moment of most bytes; positions are in the unit of the time axis.

    Attributes:
        start: start of each interval.
        end: end of the last interval.
        moments: for each interval, the moment (index in the timeline) with most bytes alive.
        peak_at: position of the peak.
        phases: forward, loss, backward, optimizer step.
        units: paths of the units in the order they run; "" outside of units.
        axis: label of the time axis.
    """

    start: NDArray[np.float64]
    end: float
    moments: NDArray[np.int64]
    peak_at: float
    phases: tuple[Span, ...]
    units: tuple[Span, ...]
    axis: str


def memory_curve(timeline: Timeline, *, num_points: int, time_unit: TimeUnit) -> MemoryCurve:
    """Return the curve of a step.

    Args:
        timeline: the step.
        num_points: number of intervals.
        time_unit: unit of the axis.
    """
    at, axis = _positions(timeline, time_unit)
    end = float(at[-1])
    edges = np.linspace(0.0, end, num_points + 1)
    first = np.searchsorted(at, edges, side="left")
    total = timeline.total_bytes
    # What is alive just before an interval is alive at its start; the last interval includes its end.
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
        phases=_spans(at, [PHASES[phase] for phase in timeline.phases.tolist()], end),
        units=_spans(at, [timeline.paths[call] if call >= 0 else "" for call in timeline.calls.tolist()], end),
        axis=axis,
    )


def _positions(timeline: Timeline, time_unit: TimeUnit) -> tuple[NDArray[np.float64], str]:
    """Return the position of each moment on the axis, and the axis' label."""
    unit_s, unit = time_unit
    at = timeline.time_s / unit_s
    if at[-1] <= 0:
        return np.arange(1, len(at) + 1, dtype=np.float64), "events of the step (no times are known)"
    axis = f"predicted time ({unit})"
    if not timeline.has_times:
        axis += ", roughly: only the units' ops are timed"
    is_optimizer = timeline.phases == OPTIMIZER
    if np.count_nonzero(is_optimizer) > 1:
        # All moments of an optimizer step are at one time: spread them, and shift what comes later.
        gaps = is_optimizer & np.concatenate(([False], is_optimizer[:-1]))
        at += np.cumsum(gaps) * (_OPTIMIZER_FRACTION * at[-1] / max(1, np.count_nonzero(gaps)))
        axis += "; the optimizer step is not to scale"
    return at, axis


def _spans(at: NDArray[np.float64], names: list[str], end: float) -> tuple[Span, ...]:
    spans: list[Span] = []
    position = 0
    for name, group in itertools.groupby(names):
        start, position = position, position + len(list(group))
        until = float(at[position]) if position < len(at) else end
        if until > at[start]:
            spans.append(Span(name, float(at[start]), until))
    return tuple(spans)


def byte_unit(largest_bytes: int) -> tuple[int, str]:
    """Return the unit for an axis with this largest value: its size in bytes, and its name.

    Example:
        >>> byte_unit(60 << 30), byte_unit(5 << 20), byte_unit(900)
        ((1073741824, 'GiB'), (1048576, 'MiB'), (1024, 'KiB'))
    """
    if largest_bytes >= 2 * _GIB:
        return _GIB, "GiB"
    return (_MIB, "MiB") if largest_bytes >= 2 * _MIB else (1024, "KiB")


def time_unit_of(profile: Profile) -> TimeUnit:
    """Return the unit of a step's time axis: its length in seconds, and its name."""
    return (1.0, "s") if profile.step_s >= 1 else (1e-3, "ms")


def classics_of(frontier: Frontier) -> list[FrontierPoint]:
    """Return the classic schedules that recompute; those with equal peak and slowdown become one."""
    same: dict[tuple[int, float], FrontierPoint] = {}
    for point in frontier.classics:
        key = (point.peak_bytes, point.slowdown)
        if point.name != "keep_all":
            same[key] = replace(same[key], name=f"{same[key].name} = {point.name}") if key in same else point
    return list(same.values())


def describe_profile(profile: Profile) -> str:
    """Describe batch, hardware and PyTorch version in one line."""
    hardware = profile.device_name or profile.device
    parts = [
        f"batch {profile.batch}" if profile.batch else "",
        f"modelled for {hardware}" if profile.fake else hardware,
        f"PyTorch {profile.torch_version}" if profile.torch_version else "",
    ]
    return " · ".join(part for part in parts if part)


def percent(slowdown: float) -> str:
    """Format a slowdown as a percentage.

    Example:
        >>> percent(0.0312), percent(float("inf"))
        ('3.1 %', 'no plan')
    """
    return "no plan" if slowdown == float("inf") else f"{100 * slowdown:.1f} %"


def bound_corners(bound: Sequence[BoundPoint]) -> list[_Point]:
    """Return the corners (budget in bytes, slowdown) of a line below which there is no plan.

    The bound is the value of a linear program as a function of its right-hand side, hence convex: between two points it may be
    below their connecting line, but not below the extensions of the neighbouring lines on either side.

    Example:
        >>> bound_corners([BoundPoint(b, s) for b, s in ((0, 9.0), (2, 4.0), (4, 2.0), (6, 2.0))])
        [(0.0, 6.0), (2.0, 4.0), (2.8, 2.0), (4.0, 2.0), (4.0, 2.0), (6.0, 2.0)]
    """
    points = [(float(p.budget_bytes), p.slowdown) for p in bound if math.isfinite(p.slowdown)]
    corners: list[_Point] = []
    for index, (left, right) in enumerate(itertools.pairwise(points)):
        before = (points[index - 1], left) if index > 0 else None
        after = (right, points[index + 2]) if index + 2 < len(points) else None
        corners += [left, _lowest(left, right, before, after)]
    # The first two share a budget; the lower one is valid.
    return [*corners[1:], *points[-1:]]


def _lowest(
    left: _Point, right: _Point, before: tuple[_Point, _Point] | None, after: tuple[_Point, _Point] | None
) -> _Point:
    """Return the lowest corner between two points of a convex bound that never rises and is never negative."""
    low = 0.0 if after is None else _slope(*after)
    steep = -math.inf if before is None else _slope(*before)
    # Intersect the line through `right` with the slope after it and the line through `left` with the slope before it.
    if math.isinf(steep):
        return left[0], min(left[1], right[1] + low * (left[0] - right[0]))
    if steep >= low:
        return right
    x = (right[1] - low * right[0] - left[1] + steep * left[0]) / (steep - low)
    x = min(max(x, left[0]), right[0])
    return x, max(right[1] + low * (x - right[0]), 0.0)


def _slope(one: _Point, other: _Point) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])
