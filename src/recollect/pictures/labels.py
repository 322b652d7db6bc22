"""Place labels in a matplotlib picture so that they cover neither marks nor lines nor each other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Candidate offsets of a label from its mark, in points, best first.
_OFFSETS = [
    (side * x, y, "left" if side > 0 else "right")
    for y in (6, -12, 16, -22, 27, -33, 38, -44)
    for side in (1, -1)
    for x in (7, 2, 16)
]
_MARK_RADIUS = 9
_LINE_RADIUS = 2
# A label farther from its mark, in pixels, gets a line to it.
_FAR = 14
# Costs in square pixels of overlap: labels outside of the axes are cut off, labels nearest to another mark mislead.
_OUTSIDE_COST = 1e6
_MISLEADING_COST = 300


@dataclass(frozen=True, slots=True)
class Mark:
    """A data point and its label; none if the name is empty."""

    x: float
    y: float
    name: str = ""
    color: str = "#333333"


def place_labels(figure: Any, axes: Any, marks: Sequence[Mark], lines: Sequence[Sequence[Mark]] = ()) -> None:
    """Write the marks' names where there is room.

    Args:
        figure: a matplotlib figure with its final layout.
        axes: the axes of the marks, with final limits.
        marks: the marks to label.
        lines: other lines not to cover, each given by its corners.
    """
    figure.canvas.draw()
    figure.set_layout_engine("none")  # labels must not change the layout
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
        for rank, (right, up, align) in enumerate(_OFFSETS):
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
    """Draw a line from a mark to its label if they are far apart."""
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
    """Return the distance in pixels from a point to a box."""
    x, y = point
    return math.hypot(max(box.x0 - x, 0.0, x - box.x1), max(box.y0 - y, 0.0, y - box.y1))


def _overlap(one: Any, other: Any) -> float:
    """Return the area that two boxes share, in square pixels."""
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return float(max(0.0, width) * max(0.0, height))


def _is_outside(box: Any, frame: Any) -> bool:
    return bool(box.x0 < frame.x0 or box.x1 > frame.x1 or box.y0 < frame.y0 or box.y1 > frame.y1)
