"""Units, texts and the line of the lower bound, shared by all pictures."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from recollect.planning.frontier import BoundPoint, Frontier, FrontierPoint
from recollect.profile.profile import Profile

_Point = tuple[float, float]
_GIB = 1 << 30
_MIB = 1 << 20


def byte_unit(largest_bytes: int) -> tuple[int, str]:
    """Return the unit for an axis with this largest value: its size in bytes, and its name.

    Example:
        >>> byte_unit(60 << 30), byte_unit(5 << 20), byte_unit(900)
        ((1073741824, 'GiB'), (1048576, 'MiB'), (1024, 'KiB'))
    """
    if largest_bytes >= 2 * _GIB:
        return _GIB, "GiB"
    return (_MIB, "MiB") if largest_bytes >= 2 * _MIB else (1024, "KiB")


def time_unit_of(profile: Profile) -> tuple[float, str]:
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
    hardware = profile.device_name or profile.device
    parts = [
        f"batch {profile.batch}" if profile.batch else "",
        f"modelled for {hardware}" if profile.fake else hardware,
        f"PyTorch {profile.torch_version}" if profile.torch_version else "",
    ]
    return " · ".join(part for part in parts if part)


def percent(slowdown: float) -> str:
    return "no plan" if slowdown == float("inf") else f"{100 * slowdown:.1f} %"


def bound_corners(bound: Sequence[BoundPoint]) -> list[_Point]:
    """Return the corners (budget in bytes, slowdown) of a line below which no plan exists.

    The bound is the value of a linear program as a function of its right-hand side, hence convex: between two points it may be
    below their connecting line, but not below the extensions of the neighbouring lines on either side.
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
