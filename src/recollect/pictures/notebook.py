"""Draw objects that a notebook displays: as static HTML, with a picture if there is one, and a table.

Names of modules and values are untrusted text, and are escaped. Without matplotlib there are tables only.
"""

import base64
from collections.abc import Callable, Iterable, Sequence
from functools import singledispatch
from html import escape
from io import BytesIO
from typing import Any

from recollect.byte_format import format_bytes
from recollect.errors import MissingPackageError
from recollect.pictures.png import frontier_figure, memory_figure
from recollect.pictures.style import CATEGORY_COLORS, save_png
from recollect.pictures.words import describe_profile, percent
from recollect.planning.frontier import Frontier
from recollect.plans.paths import expand_classes
from recollect.plans.plan import Plan
from recollect.plans.text import label_paths, unit_rows
from recollect.profile.graph import UnitGraph
from recollect.profile.profile import Profile, kind_text
from recollect.quantities import format_seconds
from recollect.simulation.timeline import PeakReport, Timeline, timeline

_WIDTH = 825
_CELL = "text-align:left;vertical-align:top;padding:1px 10px 1px 0"
_NUMBER = "text-align:right;vertical-align:top;padding:1px 10px 1px 0;white-space:nowrap"
_Row = Sequence[object]


@singledispatch
def html_of(shown: object) -> str:
    """Return an object's view in a notebook; without its own view, as for a report, its rows or its text."""
    rows = getattr(shown, "rows", None)
    return f"<pre>{escape(str(shown))}</pre>" if rows is None else _table((), rows())


@html_of.register
def _plan(plan: Plan) -> str:
    rows: list[_Row] = []
    for label, items in unit_rows(plan.units, expand_classes(plan.class_names), plan.loss_text):
        for number, item in enumerate(items):
            verb, _, names = item.partition("\t")
            rows.append(("" if number else label, verb.strip(), names))
    profile = plan.source and plan.source()
    picture = "" if profile is None else _picture(lambda: memory_figure(timeline(profile, plan)), str(plan))
    return picture + _table(("units", "", "values"), rows) + _lines(plan.prediction_lines(columns=200))


@html_of.register
def _profile(profile: Profile) -> str:
    found = timeline(profile, Plan({}))
    paths_of: dict[UnitGraph, list[str]] = {}
    for call in profile.calls:
        paths_of.setdefault(profile.graph_of(call), []).append(call.path or "the model")
    classes = expand_classes(profile.class_names)
    rows: list[_Row] = []
    for graph, paths in paths_of.items():
        label = label_paths(list(dict.fromkeys(paths)), classes)
        rows.append((label, len(paths), format_bytes(graph.saved_bytes), format_seconds(graph.forward_s)))
    head = [f"{profile.model_class or 'model'}: {describe_profile(profile)}"]
    held = [f"{kind_text(kind)} {format_bytes(nbytes)}" for kind, nbytes in profile.persistent.items() if nbytes]
    peak = f"without recompute {format_bytes(found.report.peak_bytes)} in {found.report.where}"
    picture = _picture(lambda: memory_figure(found), peak)
    table = _table(("units", "runs", "each saves", "forward"), rows, num_texts=1)
    return _lines(head) + picture + table + _lines([peak, f"throughout: {', '.join(held)}" if held else ""])


@html_of.register
def _frontier(frontier: Frontier) -> str:
    source = frontier.points[0].plan.source
    rows: list[_Row] = []
    for point in frontier.with_classics:
        bound = "" if point.bound_slowdown is None else percent(point.bound_slowdown)
        rows.append((point.name, format_bytes(point.peak_bytes), percent(point.slowdown), bound))
    picture = _picture(lambda: frontier_figure(source and source(), frontier), "slowdown against peak")
    return picture + _table(("plan", "peak", "slowdown", "no plan below"), rows, num_texts=1)


@html_of.register
def _timeline(found: Timeline) -> str:
    return _picture(lambda: memory_figure(found), str(found.report)) + html_of(found.report)


@html_of.register
def _peak(report: PeakReport) -> str:
    rows: list[_Row] = []
    for category, nbytes in report.by_category.items():
        mark = f'<span style="color:{CATEGORY_COLORS[category]}">&#9632;</span> '
        rows.append((_Html(mark + escape(category)), "", format_bytes(nbytes)))
        items = [item for item in report.items if item.category == category and item.name != category]
        rows += [("", item.name, format_bytes(item.nbytes)) for item in items]
    head = f"{format_bytes(report.peak_bytes)} alive at the peak: {report.where}"
    return _lines([head]) + _table(("", "", "bytes"), rows, num_texts=2)


class _Html(str):
    __slots__ = ()


def _table(heads: Sequence[str], rows: Iterable[_Row], num_texts: int = 3) -> str:
    """Return a table; the columns after the first `num_texts` are numbers."""
    styles = [_CELL if number < num_texts else _NUMBER for number in range(max(4, num_texts))]

    def line(tag: str, cells: _Row) -> str:
        shown = (cell if isinstance(cell, _Html) else escape(str(cell)) for cell in cells)
        return (
            "<tr>" + "".join(f'<{tag} style="{s}">{c}</{tag}>' for s, c in zip(styles, shown, strict=False)) + "</tr>"
        )

    head = [line("th", heads)] if any(heads) else []
    return f'<table style="font-size:90%">{"".join([*head, *(line("td", row) for row in rows)])}</table>'


def _lines(lines: Iterable[str]) -> str:
    shown = "<br>".join(escape(line) for line in lines if line)
    return f'<p style="margin:4px 0">{shown}</p>' if shown else ""


def _picture(draw: Callable[[], Any], text: str) -> str:
    """Return a picture with an alternative text; without matplotlib, a line that says so."""
    drawn = BytesIO()
    try:
        save_png(draw(), drawn)
    except MissingPackageError as missing:
        return _lines([f"No picture: {missing}"])
    data = base64.b64encode(drawn.getvalue()).decode()
    return f'<img width="{_WIDTH}" style="max-width:100%" alt="{escape(text)}" src="data:image/png;base64,{data}">'
