"""Draw the lower bound as a line that is valid between the budgets at which it was computed, too."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from recollect.planning.frontier import BoundPoint

__all__ = ["bound_corners"]

_Point = tuple[float, float]


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
