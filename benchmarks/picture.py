"""Draw the frontier benchmark: recollect as a line, its peers as numbered points with a list of their names.

The picture is drawn from rows of `frontier.csv`, so it can be drawn again without measuring again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comparison import PLAIN, falling
from labels import Mark, place_labels
from recollect.pictures.style import CLASSIC, INK, OURS, new_figure, save_png, set_title
from results_csv import Number

# Room on either side of the medians, as a fraction of their range; longer whiskers are cut off.
_MARGIN = 0.12


@dataclass(frozen=True, slots=True)
class _Point:
    """A contestant: peak in % of the activations, predicted slowdown, median and spread of the measured one, in %."""

    name: str
    peak: float
    median: float
    low: float
    high: float
    predicted: float | None


def draw(numbers: Iterable[Number], out: Path, *, title: str, note: str) -> None:
    """Draw measured slowdown over measured peak, with recollect's predictions; draw nothing if nothing was timed.

    Args:
        numbers: rows of `tables.peak_numbers` and `tables.time_numbers` for one comparison.
        out: the PNG.
        title: the model.
        note: its sizes and machine.
    """
    points = sorted(_points(numbers), key=lambda one: (one.peak, one.median))
    peers = [one for one in points if one.predicted is None]
    ours = [one for one in points if one.predicted is not None]
    if not peers or not ours:
        return
    figure, axes = new_figure(11.5, 6)
    low, high = min(0.0, *(one.median for one in points)), max(one.median for one in points)
    margin = _MARGIN * (high - low)
    axes.set_ylim(low - margin, high + margin)
    axes.plot(
        [one.peak for one in ours], [one.predicted for one in ours], color=OURS, linewidth=1.4, linestyle=(0, (4, 2)),
        alpha=0.6, label="recollect, predicted", zorder=2,
    )  # fmt: skip
    # A plan that is slower with more memory is noise, which the line does not follow.
    smooth = [Mark(one.peak, y) for one, y in zip(ours, falling([one.median for one in ours]), strict=True)]
    axes.plot(
        [corner.x for corner in smooth], [corner.y for corner in smooth], color=OURS, linewidth=2.4, zorder=3,
        label="recollect, the falling line nearest to its medians",
    )  # fmt: skip
    _whiskers(axes, ours, "o", OURS, label="recollect, measured")
    _whiskers(axes, peers, "D", CLASSIC, label="peers, measured")
    axes.plot(100, 0, marker="s", markersize=7, color=INK, linestyle="none", zorder=5, label="no recompute")
    _style(axes, title, note)
    _list_names(axes, peers)
    numbered = [Mark(one.peak, one.median, str(number), CLASSIC) for number, one in enumerate(peers, 1)]
    others = [Mark(one.peak, one.median) for one in ours]
    whiskers = [[Mark(one.peak, max(one.low, low)), Mark(one.peak, min(one.high, high))] for one in points]
    place_labels(figure, axes, [*numbered, *others, Mark(100, 0)], [smooth, *whiskers])
    out.parent.mkdir(parents=True, exist_ok=True)
    save_png(figure, out)


def _points(numbers: Iterable[Number]) -> list[_Point]:
    """Return the contestants whose steps were timed."""
    values: dict[str, dict[str, float]] = {}
    for number in numbers:
        if number.unit != "text":
            values.setdefault(number.metric, {})[number.contestant] = float(number.value)
    resident_bytes = values["resident"][PLAIN]
    activation_bytes = values["peak"][PLAIN] - resident_bytes
    predicted = values.get("predicted_slowdown", {})
    return [
        _Point(
            name=name.partition(" (")[0],
            peak=100 * (values["peak"][name] - resident_bytes) / activation_bytes,
            median=100 * slowdown,
            low=100 * values["slowdown_p20"][name],
            high=100 * values["slowdown_p80"][name],
            predicted=100 * predicted[name] if name in predicted else None,
        )
        for name, slowdown in values.get("slowdown", {}).items()
    ]


def _whiskers(axes: Any, points: Sequence[_Point], marker: str, color: str, *, label: str) -> None:
    axes.errorbar(
        [one.peak for one in points],
        [one.median for one in points],
        yerr=[
            [max(0.0, one.median - one.low) for one in points],
            [max(0.0, one.high - one.median) for one in points],
        ],
        fmt=marker,
        color=color,
        markersize=5,
        elinewidth=0.8,
        label=label,
        zorder=4,
    )


def _style(axes: Any, title: str, note: str) -> None:
    set_title(axes, title, note)
    axes.set_xlabel("peak above parameters and gradients, in % of the step without recompute", color=INK)
    axes.set_ylabel("slowdown of the step (%); whiskers: 20th to 80th percentile", color=INK)
    axes.axhline(0, color="#bbbbbb", linewidth=0.8, zorder=0)
    axes.grid(color="#e6e6e6", linewidth=0.7)
    axes.margins(x=0.06)
    axes.legend(facecolor="white", edgecolor="none", framealpha=0.9, loc="upper right", fontsize=9)


def _list_names(axes: Any, peers: Sequence[_Point]) -> None:
    """List the names of the peers beside the axes, leanest first."""
    style = {"transform": axes.transAxes, "va": "top", "fontsize": 9, "color": CLASSIC, "linespacing": 1.6}
    axes.text(1.04, 1, "\n".join(str(number) for number in range(1, len(peers) + 1)), ha="right", **style)
    axes.text(1.05, 1, "\n".join(one.name for one in peers), ha="left", **style)
