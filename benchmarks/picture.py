"""The frontier benchmark as a picture: recollect as a line, its peers as numbered points, their names beside it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

from contest import Contestant

if TYPE_CHECKING:
    from comparison import Comparison

matplotlib.use("agg")  # a file needs no display
from matplotlib import pyplot

_OURS = "#1f5fa8"
_PEER = "#c4512d"
_PALE = "#9db8d6"
_INK = "#333333"
_HALF_NUMBER = 6  # half the side of the square that a number of two digits needs, in points
# Where a number may stand, in points from its mark, the best place first.
_PLACES = [
    (radius * math.cos(math.radians(angle)), radius * math.sin(math.radians(angle)))
    for radius in (11, 17, 24, 32, 42)
    for angle in (45, 135, 0, 90, 180, 270, 225, 315)
]


def draw(found: Comparison, out: Path, *, title: str, note: str) -> None:
    """Draw peak against slowdown, both measured; recollect's predictions as a dashed line. Nothing timed, no picture."""
    peers = sorted((one for one in found.peers if one.ratios), key=lambda one: (one.peak_bytes, one.slowdown))
    ours = [one for one in found.recollect if one.ratios]
    if not peers or not ours:
        return
    figure, (axes, side) = pyplot.subplots(1, 2, figsize=(11.5, 6), width_ratios=(3, 1), layout="constrained")
    plans = sorted(found.plans, key=lambda plan: plan.predicted_peak_bytes or 0)
    axes.plot(
        [_percent(found, plan.predicted_peak_bytes or 0) for plan in plans],
        [100 * (plan.predicted_slowdown or 0.0) for plan in plans],
        color=_PALE,
        linewidth=1.6,
        linestyle=(0, (4, 2)),
        label="recollect, predicted",
        zorder=2,
    )
    x = [_percent(found, one.peak_bytes) for one in ours]
    y = [100 * one.slowdown for one in ours]
    axes.plot(x, y, color=_OURS, linewidth=2.2, marker="o", markersize=4.5, label="recollect, measured", zorder=4)
    low, high = ([100 * one.percentile(percent) for one in ours] for percent in (20, 80))
    axes.fill_between(x, low, high, color=_OURS, alpha=0.12, linewidth=0, zorder=1)
    _draw_peers(found, axes, peers)
    axes.plot(100, 0, marker="s", markersize=7, color=_INK, linestyle="none", zorder=5, label="no recompute")
    _style(axes, title, note)
    _list_names(side, peers)
    _number(
        figure,
        axes,
        [(_percent(found, one.peak_bytes), 100 * one.slowdown) for one in peers],
        [*zip(x, y, strict=True)],
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=160)
    pyplot.close(figure)


def _percent(found: Comparison, peak_bytes: int) -> float:
    """How much of the plain step's activations a peak leaves room for."""
    return 100 * (peak_bytes - found.step.resident_bytes) / found.activation_bytes


def _draw_peers(found: Comparison, axes: Any, peers: Sequence[Contestant]) -> None:
    axes.errorbar(
        [_percent(found, one.peak_bytes) for one in peers],
        [100 * one.slowdown for one in peers],
        yerr=[
            [max(0.0, 100 * (one.slowdown - one.percentile(20))) for one in peers],
            [max(0.0, 100 * (one.percentile(80) - one.slowdown)) for one in peers],
        ],
        fmt="D",
        color=_PEER,
        markersize=5,
        elinewidth=0.8,
        alpha=0.95,
        label="peers, measured",
        zorder=5,
    )


def _style(axes: Any, title: str, note: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=_INK, pad=22)
    axes.text(0, 1.02, note, transform=axes.transAxes, fontsize=8.5, color="#777777")
    axes.set_xlabel("peak above parameters and gradients, in % of the step without recompute", color=_INK)
    axes.set_ylabel("slowdown of the step (%)", color=_INK)
    axes.axhline(0, color="#bbbbbb", linewidth=0.8, zorder=0)
    axes.grid(color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.margins(x=0.06, y=0.08)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=_INK)
    axes.legend(frameon=False, loc="upper right", fontsize=9.5)


def _list_names(side: Any, peers: Sequence[Contestant]) -> None:
    """Write who is who, the leanest first."""
    side.axis("off")
    lines = [f"{number:>2}  {_short(one.name)}" for number, one in enumerate(peers, 1)]
    side.text(0, 1, "\n".join(lines), va="top", fontsize=8.5, color=_PEER, linespacing=1.6, transform=side.transAxes)


def _short(name: str) -> str:
    return name.partition(" (")[0]


def _number(figure: Any, axes: Any, peers: Sequence[tuple[float, float]], line: Sequence[tuple[float, float]]) -> None:
    """Write numbers where they cover neither marks, nor the line, nor other numbers, as far as there is room."""
    figure.canvas.draw()
    figure.set_layout_engine("none")  # a number must not move what the others were placed by
    renderer = figure.canvas.get_renderer()
    marks = [axes.transData.transform(point) for point in peers]
    nodes = [axes.transData.transform(point) for point in line]
    taken = [axes.get_legend().get_window_extent(renderer)]
    taken += [_around(x, y, 8) for x, y in [*marks, *nodes]]
    taken += [_around(x, y, 2) for x, y in _between(nodes)]
    pixels = figure.dpi / 72
    for number, (point, mark) in enumerate(zip(peers, marks, strict=True), 1):
        costs = []
        for rank, (right, up) in enumerate(_PLACES):
            box = _around(mark[0] + right * pixels, mark[1] + up * pixels, _HALF_NUMBER * pixels)
            cost = 3 * rank + sum(_overlap(box, other) for other in taken) + 1e6 * _outside(box, axes.bbox)
            costs.append((cost, rank, box))
        _, rank, box = min(costs, key=lambda one: one[:2])
        taken.append(box)
        axes.annotate(
            str(number),
            point,
            xytext=_PLACES[rank],
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=8.5,
            color=_PEER,
            arrowprops={"arrowstyle": "-", "color": _PEER, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 2},
            zorder=6,
        )


def _around(x: float, y: float, radius: float) -> Any:
    return matplotlib.transforms.Bbox.from_extents(x - radius, y - radius, x + radius, y + radius)


def _between(points: Sequence[Any]) -> list[tuple[float, float]]:
    """Return points along a line, a few pixels apart."""
    found = []
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        steps = 1 + int(max(abs(x1 - x0), abs(y1 - y0)) / 4)
        found += [(x0 + (x1 - x0) * i / steps, y0 + (y1 - y0) * i / steps) for i in range(steps)]
    return found


def _overlap(one: Any, other: Any) -> float:
    """Area that two boxes share, in square pixels."""
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return max(0.0, width) * max(0.0, height)


def _outside(box: Any, frame: Any) -> bool:
    return box.x0 < frame.x0 or box.x1 > frame.x1 or box.y0 < frame.y0 or box.y1 > frame.y1
