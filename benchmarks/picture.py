"""The frontier benchmark as a picture."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

from contest import Contestant

if TYPE_CHECKING:
    from frontier import Comparison

matplotlib.use("agg")  # a file needs no display
from matplotlib import pyplot

_MIB = 1 << 20
_OURS = "#1f5fa8"
_PEER = "#c4512d"
_PALE = "#9db8d6"
_INK = "#333333"
# Where a label may stand, in points from its mark, the best place first.
_PLACES = [
    (side * x, y, "left" if side > 0 else "right")
    for y in (6, -12, 16, -22, 27, -33, 38, -44)
    for side in (1, -1)
    for x in (7, 2, 16)
]


def draw(found: Comparison, out: Path, *, title: str, note: str) -> None:
    """Draw peak against slowdown: recollect as a line, predicted and measured, its peers as points."""
    figure, axes = pyplot.subplots(figsize=(9.5, 5.6), layout="constrained")
    peers = [match.peer for match in found.matches]
    plans = sorted(found.plans, key=lambda plan: plan.predicted_peak_bytes or 0)
    axes.plot(
        [(plan.predicted_peak_bytes or 0) / _MIB for plan in plans],
        [100 * (plan.predicted_slowdown or 0.0) for plan in plans],
        color=_PALE,
        linewidth=1.6,
        linestyle=(0, (4, 2)),
        label="recollect, predicted",
        zorder=2,
    )
    x, y = _coordinates(found.recollect)
    axes.plot(x, y, color=_OURS, linewidth=2.2, marker="o", markersize=5.5, label="recollect, measured", zorder=4)
    spread = [[100 * one.percentile(percent) for one in found.recollect] for percent in (20, 80)]
    axes.fill_between(x, spread[0], spread[1], color=_OURS, alpha=0.12, linewidth=0, zorder=1)
    x, y = _coordinates(peers)
    below = [max(0.0, 100 * (one.slowdown - one.percentile(20))) for one in peers]
    above = [max(0.0, 100 * (one.percentile(80) - one.slowdown)) for one in peers]
    axes.errorbar(
        x,
        y,
        yerr=[below, above],
        fmt="D",
        color=_PEER,
        markersize=6,
        elinewidth=1,
        alpha=0.95,
        label="by hand, measured",
        zorder=5,
    )
    axes.plot(found.plain.peak_bytes / _MIB, 0, marker="s", markersize=7, color=_INK, linestyle="none", zorder=5)
    _style(axes, title, note)
    _label(figure, axes, [*peers, found.plain], found.recollect)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=160)
    pyplot.close(figure)


def _coordinates(contestants: Sequence[Contestant]) -> tuple[list[float], list[float]]:
    """Peaks in MiB, slowdowns in percent."""
    return [one.peak_bytes / _MIB for one in contestants], [100 * _slowdown(one) for one in contestants]


def _slowdown(one: Contestant) -> float:
    return one.slowdown if one.ratios else 0.0


def _style(axes: Any, title: str, note: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=_INK, pad=22)
    axes.text(0, 1.02, note, transform=axes.transAxes, fontsize=8.5, color="#777777")
    axes.set_xlabel("peak of the step, parameters and gradients included (MiB)", color=_INK)
    axes.set_ylabel("slowdown of the step (%)", color=_INK)
    axes.axhline(0, color="#bbbbbb", linewidth=0.8, zorder=0)
    axes.grid(color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.margins(x=0.1, y=0.1)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=_INK)
    axes.legend(frameon=False, loc="upper right", fontsize=9.5)


def _label(figure: Any, axes: Any, named: Sequence[Contestant], line: Sequence[Contestant]) -> None:
    """Write names where they cover neither marks, nor the line, nor other names, as far as there is room."""
    figure.canvas.draw()
    figure.set_layout_engine("none")  # a label must not move what the others were placed by
    renderer = figure.canvas.get_renderer()
    at = {one: axes.transData.transform((one.peak_bytes / _MIB, 100 * _slowdown(one))) for one in [*named, *line]}
    taken = [axes.get_legend().get_window_extent(renderer)]
    taken += [_around(x, y, 9) for x, y in at.values()]
    taken += [_around(x, y, 2) for x, y in _between([at[one] for one in line])]
    for one in sorted(named, key=lambda one: (one.peak_bytes, _slowdown(one))):
        best: tuple[float, Any, Any] | None = None
        for rank, (right, up, align) in enumerate(_PLACES):
            text = axes.annotate(
                one.name,
                (one.peak_bytes / _MIB, 100 * _slowdown(one)),
                xytext=(right, up),
                textcoords="offset points",
                ha=align,
                fontsize=9,
                color=_PEER if one.ratios else _INK,
                zorder=6,
            )
            box = text.get_window_extent(renderer)
            nearest = min(named, key=lambda other: _distance(box, at[other]))
            cost = rank + sum(_overlap(box, other) for other in taken)
            cost += 1e6 * _outside(box, axes.bbox) + 300 * (nearest is not one)
            if best is None or cost < best[0]:
                if best is not None:
                    best[1].remove()
                best = (cost, text, box)
            else:
                text.remove()
        if best is not None:
            taken.append(best[2])


def _around(x: float, y: float, radius: float) -> Any:
    return matplotlib.transforms.Bbox.from_extents(x - radius, y - radius, x + radius, y + radius)


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
    return max(0.0, width) * max(0.0, height)


def _outside(box: Any, frame: Any) -> bool:
    return box.x0 < frame.x0 or box.x1 > frame.x1 or box.y0 < frame.y0 or box.y1 > frame.y1
