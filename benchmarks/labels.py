"""Write labels next to the marks of a picture, where they cover neither marks nor each other."""

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
# Costs in square pixels of overlap: labels outside of the axes are cut off, labels nearest to a different mark mislead.
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
    """Write the marks' names where there is room, on a figure with its final layout; `lines` are not covered either."""
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
        style = {"textcoords": "offset points", "fontsize": 9, "color": mark.color, "zorder": 6}
        text = axes.annotate(mark.name, (mark.x, mark.y), xytext=(0, 0), **style)
        costs = []
        for rank, offset in enumerate(_OFFSETS):
            box = _moved(text, offset, renderer)
            nearest = min(named, key=lambda other: _distance(box, at[other]))
            cost = rank + sum(_shared_area(box, other) for other in taken)
            is_outside = not (axes.bbox.contains(*box.min) and axes.bbox.contains(*box.max))
            costs.append(cost + _OUTSIDE_COST * is_outside + _MISLEADING_COST * (nearest is not mark))
        taken.append(_moved(text, _OFFSETS[costs.index(min(costs))], renderer))
        _join(axes, mark, at[mark], taken[-1])


def _moved(text: Any, offset: tuple[int, int, str], renderer: Any) -> Any:
    """Move a label to an offset from its mark; return the box that it takes up there."""
    right, up, align = offset
    text.set(position=(right, up), ha=align)
    return text.get_window_extent(renderer)


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
    x, y = point
    return math.hypot(max(box.x0 - x, 0.0, x - box.x1), max(box.y0 - y, 0.0, y - box.y1))


def _shared_area(one: Any, other: Any) -> float:
    shared = one.intersection(one, other)
    return 0.0 if shared is None else float(shared.width * shared.height)
