"""Draw PNG pictures: the frontier, and the memory of one plan over time.

Without matplotlib, or where the file cannot be written, drawing raises `RecollectError`.
"""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np

from recollect.byte_format import format_bytes
from recollect.pictures.curves import MemoryCurve, Span, memory_curve
from recollect.pictures.style import (
    BOUND,
    CATEGORY_COLORS,
    CLASSIC,
    INK,
    OURS,
    PALE,
    new_figure,
    save_png,
    set_title,
)
from recollect.pictures.words import bound_corners, byte_unit, classics_of, describe_profile, percent, time_unit_of
from recollect.planning.classic import classic_plan
from recollect.planning.frontier import Frontier
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile
from recollect.simulation.timeline import CATEGORIES, Timeline, timeline

_NUM_POINTS = 900
# Room to the left of the leanest plan, where only the bound is, as a fraction of the range.
_LEFT_FRACTION = 0.15
# Phases narrower than this fraction have no room for a name.
_LEAST_NAMED_FRACTION = 0.055
# Shorter visits of units are not drawn: backward briefly visits others, such as the one that made the rotary embedding.
_SHORTEST_UNIT_FRACTION = 0.004
_UNIT_SHADES = ("#5b7fa6", "#9db8d6")
_MOST_ITEMS = 6
_LONGEST_NAME = 32
# Of classic schedules.
_MARKERS = "D^P*Xvhp"
# Left, bottom, width and height, as fractions of the figure; the legends are to the right.
_MEMORY_PLACE = (0.055, 0.175, 0.67, 0.715)


def draw_frontier(profile: Profile, frontier: Frontier, out: str | Path) -> None:
    """Draw slowdown over peak: the plans, the lower bound, and the classic schedules."""
    save_png(frontier_figure(profile, frontier), Path(out))


def frontier_figure(profile: Profile | None, frontier: Frontier) -> Any:
    """Return the figure of `draw_frontier`; without a profile, its title names no model."""
    figure, axes = new_figure(9.5, 5.4)
    unit_bytes, unit = byte_unit(frontier.plain_peak_bytes)
    peaks = [point.peak_bytes / unit_bytes for point in frontier.points]
    axes.plot(
        peaks,
        [100 * point.slowdown for point in frontier.points],
        color=OURS,
        linewidth=2.2,
        marker="o",
        markersize=4.5,
        label="recollect",
        zorder=4,
    )
    for point, marker in zip(classics_of(frontier), itertools.cycle(_MARKERS), strict=False):
        peaks.append(point.peak_bytes / unit_bytes)
        axes.plot(peaks[-1], 100 * point.slowdown, marker, color=CLASSIC, markersize=7, label=point.name, zorder=5)
    plain = frontier.plain_peak_bytes / unit_bytes
    axes.plot(plain, 0.0, "s", color=INK, markersize=7, label="keep all", zorder=5)
    name, note = ("Model", "") if profile is None else (profile.model_class or "Model", describe_profile(profile))
    set_title(axes, f"{name}: every memory budget and what it costs", note)
    axes.set_xlabel(f"predicted peak of the step ({unit})", color=INK)
    axes.set_ylabel("predicted slowdown (%)", color=INK)
    axes.grid(color="#e6e6e6", linewidth=0.7)
    axes.margins(x=0.1, y=0.12)
    axes.set_ylim(bottom=min(0.0, -0.02 * axes.get_ylim()[1]))
    axes.set_xlim(left=min(peaks) - _LEFT_FRACTION * (plain - peaks[0]))
    _draw_bound(axes, frontier, unit_bytes)
    axes.legend(frameon=False, loc="best", fontsize=9.5)
    return figure


def _draw_bound(axes: Any, frontier: Frontier, unit_bytes: int) -> None:
    corners = bound_corners(frontier.bound)
    if corners:
        x, y = [nbytes / unit_bytes for nbytes, _ in corners], [100 * slowdown for _, slowdown in corners]
        axes.fill_between(x, y, color=BOUND, alpha=0.18, linewidth=0, label="no plan can be here")
        axes.plot(x, y, color=BOUND, linewidth=1)
    for point in frontier.bound:
        if math.isinf(point.slowdown):
            left, right = axes.get_xlim()
            if left < point.budget_bytes / unit_bytes:
                axes.axvspan(left, point.budget_bytes / unit_bytes, color=BOUND, alpha=0.18, linewidth=0)
            axes.set_xlim(left, right)


def draw_memory(profile: Profile, plan: Plan, out: str | Path) -> None:
    """Draw the memory of a step over time under a plan, by category, with the budget and the values alive at the peak."""
    save_png(memory_figure(timeline(profile, plan)), Path(out))


def memory_figure(found: Timeline) -> Any:
    figure, axes = new_figure(11, 5.8)
    profile, plan = found.profile, found.plan
    curve = memory_curve(found, num_points=_NUM_POINTS, time_unit=time_unit_of(profile))
    plain = timeline(profile, classic_plan(profile, "keep_all"))
    most_host_bytes = int(found.host_bytes.max())
    highest_bytes = max(plain.report.peak_bytes, found.report.peak_bytes, plan.budget_bytes or 0, most_host_bytes)
    unit_bytes, unit = byte_unit(highest_bytes)
    axes.set(xlim=(0, curve.end), ylim=(0, 1.13 * highest_bytes / unit_bytes))
    _stack(axes, found, curve, unit_bytes)
    curve_of_plain = memory_curve(plain, num_points=_NUM_POINTS, time_unit=time_unit_of(profile))
    nbytes = plain.total_bytes[curve_of_plain.moments] / unit_bytes
    label = f"without recompute, {format_bytes(plain.report.peak_bytes)}"
    axes.plot(curve_of_plain.start, nbytes, color=PALE, linewidth=0.9, drawstyle="steps-post", label=label, zorder=4)
    if most_host_bytes:
        host = found.host_bytes[curve.moments] / unit_bytes
        label = f"in host memory, at most {format_bytes(most_host_bytes)}"
        axes.plot(curve.start, host, color=CLASSIC, linestyle=":", drawstyle="steps-post", label=label, zorder=6)
    if plan.budget_bytes is not None:
        budget = plan.budget_bytes / unit_bytes
        axes.axhline(
            budget,
            color=INK,
            linewidth=1.3,
            linestyle=(0, (5, 3)),
            label=f"budget {format_bytes(plan.budget_bytes)}",
            zorder=5,
        )
    peak = found.report.peak_bytes / unit_bytes
    where = f"peak, {_shortened(found.where(found.peak))}"
    axes.plot(curve.peak_at, peak, "o", color=INK, markersize=6, zorder=7, label=where)
    slowdown = "" if plan.predicted_slowdown is None else f", {percent(plan.predicted_slowdown)} slower"
    title = (
        f"{profile.model_class or 'Model'}: memory of one step, peak {format_bytes(found.report.peak_bytes)}{slowdown}"
    )
    set_title(axes, title, describe_profile(profile))
    _draw_phases(axes, curve)
    _draw_units(axes, curve)
    axes.set_xlabel(curve.axis, color=INK, labelpad=34)
    axes.set_ylabel(f"bytes alive ({unit})", color=INK)
    # A fixed position: the layout engine does not make room for two legends.
    figure.set_layout_engine("none")
    axes.set_position(_MEMORY_PLACE)
    _legend(axes, found)
    return figure


def _shortened(text: str) -> str:
    """Cut the middle out of long text, as both ends of a path matter."""
    if len(text) <= _LONGEST_NAME:
        return text
    half = (_LONGEST_NAME - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def _stack(axes: Any, found: Timeline, curve: MemoryCurve, unit_bytes: int) -> None:
    edges = np.append(curve.start, curve.end)
    below = np.zeros(len(edges))
    for category in CATEGORIES:
        nbytes = found.bytes_of[category][curve.moments] / unit_bytes
        above = below + np.append(nbytes, nbytes[-1])
        axes.fill_between(edges, below, above, step="post", color=CATEGORY_COLORS[category], linewidth=0)
        below = above


def _draw_phases(axes: Any, curve: MemoryCurve) -> None:
    for phase in curve.phases:
        if phase.start > 0:
            axes.axvline(phase.start, color=INK, linewidth=0.7, alpha=0.5)
        if phase.end - phase.start >= _LEAST_NAMED_FRACTION * curve.end:
            name = phase.name.replace("optimizer step", "optimizer")
            axes.text((phase.start + phase.end) / 2, 0.985, name, transform=axes.get_xaxis_transform(), ha="center",
                      va="top", fontsize=9, color=INK)  # fmt: skip


def _draw_units(axes: Any, curve: MemoryCurve) -> None:
    """Draw a strip below the axis with the units that run, in alternating shades, and the names of groups of layers."""
    strip = {"transform": axes.get_xaxis_transform(), "clip_on": False, "linewidth": 0}
    shortest = _SHORTEST_UNIT_FRACTION * curve.end
    spans = [span for span in curve.units if span.name and span.end - span.start >= shortest]
    shades: dict[str, str] = {}
    for span in spans:
        color = shades.setdefault(span.name, _UNIT_SHADES[len(shades) % 2])
        axes.fill_between([span.start, span.end], -0.1, -0.075, color=color, **strip)
    for group in _groups(spans):
        if group.end - group.start >= 0.012 * len(group.name) * curve.end:
            axes.text((group.start + group.end) / 2, -0.11, group.name, transform=axes.get_xaxis_transform(),
                      ha="center", va="top", fontsize=8, color=PALE, parse_math=False)  # fmt: skip


def _groups(spans: list[Span]) -> list[Span]:
    """Merge consecutive layers of one list, such as layers.0 to layers.31 in forward, into one span."""
    found = []
    for stem, run in itertools.groupby(spans, key=lambda span: span.name.rpartition(".")[0] or span.name):
        members = list(run)
        ends = [members[0].name.rpartition(".")[2], members[-1].name.rpartition(".")[2]]
        name = members[0].name if ends[0] == ends[1] else f"{stem}.{ends[0]} to {ends[1]}"
        found.append(Span(_shortened(name), members[0].start, members[-1].end))
    return found


def _legend(axes: Any, found: Timeline) -> None:
    """List the values alive at the peak next to the axes: by category, and the largest items."""
    from matplotlib.patches import Patch

    lines = axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8.5, borderaxespad=0)
    axes.add_artist(lines)
    at_peak = found.report.by_category
    patches = [
        Patch(color=CATEGORY_COLORS[category], label=f"{format_bytes(at_peak.get(category, 0))}  {category}")
        for category in reversed(CATEGORIES)
        if found.bytes_of[category].any()
    ]
    blocks = axes.legend(
        handles=patches, loc="upper left", bbox_to_anchor=(1.01, 0.80), frameon=False, fontsize=8.5, borderaxespad=0,
        title="alive at the peak", title_fontproperties={"size": 9, "weight": "bold"}, alignment="left",
    )  # fmt: skip
    blocks.get_title().set_color(INK)
    items = [item for item in found.report.items if item.category in ("kept values", "recomputed values")]
    items.sort(key=lambda item: -item.nbytes)
    text = [f"{format_bytes(item.nbytes):>9}  {_shortened(item.name)}" for item in items[:_MOST_ITEMS]]
    if text:
        if len(items) > _MOST_ITEMS:
            rest_bytes = sum(item.nbytes for item in items[_MOST_ITEMS:])
            text.append(f"{format_bytes(rest_bytes):>9}  in {len(items) - _MOST_ITEMS} others")
        style = {"fontsize": 7, "family": "monospace", "color": INK, "va": "bottom", "parse_math": False}
        axes.text(1.015, 0.0, "\n".join(["of the values", *text]), transform=axes.transAxes, **style)
