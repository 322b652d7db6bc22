"""Names beside marks of a matplotlib picture, where they cover neither marks nor lines nor each other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Mark", "place_labels"]

# Where a label may stand, in points from its mark, the best place first.
_PLACES = [
    (side * x, y, "left" if side > 0 else "right")
    for y in (6, -12, 16, -22, 27, -33, 38, -44)
    for side in (1, -1)
    for x in (7, 2, 16)
]
_MARK_RADIUS = 9
_LINE_RADIUS = 2
# In pixels: a label that is farther from its mark gets a line to it.
_FAR = 14
# In square pixels of overlap: a label outside of the axes is cut off, one nearest to another mark misleads.
_OUTSIDE_COST = 1e6
_MISLEADING_COST = 300


@dataclass(frozen=True, slots=True)
class Mark:
    """A point of the data, and what to write beside it; nothing if the name is empty."""

    x: float
    y: float
    name: str = ""
    color: str = "#333333"


def place_labels(figure: Any, axes: Any, marks: Sequence[Mark], lines: Sequence[Sequence[Mark]] = ()) -> None:
    """Write the marks' names where there is room.

    Args:
        figure: a matplotlib figure that is laid out; nothing may move afterwards.
        axes: where the marks are, with its limits set.
        marks: what is to be named.
        lines: what is drawn besides and should not be covered: each the corners of a line.
    """
    figure.canvas.draw()
    figure.set_layout_engine("none")  # a label must not move what the others were placed by
    renderer = figure.canvas.get_renderer()
    at = {mark: axes.transData.transform((mark.x, mark.y)) for mark in {*marks, *itertools.chain(*lines)}}
    named = [mark for mark in marks if mark.name]
    legend = axes.get_legend()
    taken = [] if legend is None else [legend.get_window_extent(renderer)]
    taken += [text.get_window_extent(renderer) for text in axes.texts]
    taken += [_around(at[mark][0], at[mark][1], _MARK_RADIUS) for mark in marks]
    taken += [_around(x, y, _LINE_RADIUS) for line in lines for x, y in _between([at[corner] for corner in line])]
    for mark in sorted(named, key=lambda m: (m.x, m.y)):
        best: tuple[float, Any, Any] | None = None
        for rank, (right, up, align) in enumerate(_PLACES):
            text = axes.annotate(
                mark.name,
                (mark.x, mark.y),
                xytext=(right, up),
                textcoords="offset points",
                ha=align,
                fontsize=9,
                color=mark.color,
                zorder=6,
            )
            box = text.get_window_extent(renderer)
            nearest = min(named, key=lambda other: _distance(box, at[other]))
            cost = rank + sum(_overlap(box, other) for other in taken)
            cost += _OUTSIDE_COST * _is_outside(box, axes.bbox) + _MISLEADING_COST * (nearest is not mark)
            if best is None or cost < best[0]:
                if best is not None:
                    best[1].remove()
                best = (cost, text, box)
            else:
                text.remove()
        if best is not None:
            taken.append(best[2])
            _join(axes, mark, at[mark], best[2])


def _join(axes: Any, mark: Mark, point: Any, box: Any) -> None:
    """Draw a line from a mark to a label that is not right beside it."""
    from matplotlib.lines import Line2D

    if _distance(box, point) <= _FAR:
        return
    end = (min(max(point[0], box.x0), box.x1), min(max(point[1], box.y0), box.y1))
    x, y = axes.transData.inverted().transform(end)
    axes.add_artist(Line2D([mark.x, x], [mark.y, y], color=mark.color, linewidth=0.6, zorder=5))


def _around(x: float, y: float, radius: float) -> Any:
    from matplotlib.transforms import Bbox

    return Bbox.from_extents(x - radius, y - radius, x + radius, y + radius)


def _between(points: Sequence[Any]) -> list[tuple[float, float]]:
    """Return points along a line, a few pixels apart."""
    found = []
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        steps = 1 + int(max(abs(x1 - x0), abs(y1 - y0)) / 4)
        found += [(x0 + (x1 - x0) * i / steps, y0 + (y1 - y0) * i / steps) for i in range(steps)]
    return found


def _distance(box: Any, point: Any) -> float:
    """Pixels from a point to the nearest edge of a box."""
    x, y = point
    return math.hypot(max(box.x0 - x, 0.0, x - box.x1), max(box.y0 - y, 0.0, y - box.y1))


def _overlap(one: Any, other: Any) -> float:
    """Area that two boxes share, in square pixels."""
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return float(max(0.0, width) * max(0.0, height))


def _is_outside(box: Any, frame: Any) -> bool:
    return bool(box.x0 < frame.x0 or box.x1 > frame.x1 or box.y0 < frame.y0 or box.y1 > frame.y1)
