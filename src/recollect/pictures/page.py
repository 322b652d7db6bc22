"""Write one self-contained, interactive HTML page: the frontier, and the memory of each of its plans.

The page loads nothing from the network, and its content security policy forbids it: plotly.js is included, compressed. Module
paths and value names are untrusted text: the page holds them as JSON that cannot end the script element, and `page.js` inserts
them as text. Without plotly, or where the file cannot be written, a page raises `RecollectError`.
"""

import base64
import gzip
import html
import json
import math
import re
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from recollect.byte_format import format_bytes, least_amount
from recollect.extras import needed
from recollect.fields import writing
from recollect.pictures.curves import memory_curve
from recollect.pictures.style import CATEGORY_COLORS
from recollect.pictures.words import bound_corners, byte_unit, classics_of, describe_profile, percent, time_unit_of
from recollect.planning.classic import classic_plan
from recollect.planning.frontier import Frontier, FrontierPoint
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile
from recollect.simulation.timeline import CATEGORIES, PeakReport, timeline

_NUM_POINTS = 300
_DIGITS = 5
_MOST_HOVER_LINES = 9
_HOVER_COLUMNS = 64
_LEFT_FRACTION = 0.15
_RIGHT_FRACTION = 0.05


def require_plotly() -> Any:
    with needed("plotly", by="a page"):
        import plotly
    return plotly


def write_frontier_page(
    profile: Profile, frontier: Frontier, out: str | Path, *, step_flags: Sequence[str] = ()
) -> None:
    """Write a page with the frontier, the bound and the classic schedules, and the memory of each plan over time."""
    points = [("plan", point) for point in frontier.points]
    points += [("classic", point) for point in classics_of(frontier)]
    unit_bytes, unit = byte_unit(frontier.plain_peak_bytes)
    peaks = [point.peak_bytes / unit_bytes for _, point in points]
    no_plan = [point.budget_bytes / unit_bytes for point in frontier.bound if math.isinf(point.slowdown)]
    stretch = (max(peaks) - min(peaks)) or max(peaks) or 1.0
    _write(profile, out, f"{profile.model_class or 'Model'}: every memory budget and what it costs", {
        "plans": [_plan_entry(profile, point, group, unit_bytes, step_flags) for group, point in points],
        "chosen": len(frontier.points) // 4,
        "bound": [[_rounded(nbytes / unit_bytes), _rounded(100 * s)] for nbytes, s in bound_corners(frontier.bound)],
        "no_plan_below": max(no_plan, default=None),
        "range": [min(peaks) - _LEFT_FRACTION * stretch, max(peaks) + _RIGHT_FRACTION * stretch],
        "unit": unit,
        "unit_bytes": unit_bytes,
    })  # fmt: skip


def write_plan_page(profile: Profile, plan: Plan, out: str | Path) -> None:
    """Write a page with the memory of one plan over time, and the values alive at its peak."""
    plain_bytes = classic_plan(profile, "keep_all").predicted_peak_bytes or 0
    peak_bytes = plan.predicted_peak_bytes or timeline(profile, plan).report.peak_bytes
    unit_bytes, unit = byte_unit(max(plain_bytes, peak_bytes))
    point = FrontierPoint(peak_bytes, plan.predicted_slowdown or 0.0, plan, bound_slowdown=plan.bound_slowdown)
    _write(profile, out, f"{profile.model_class or 'Model'}: the memory of a plan", {
        "plans": [_plan_entry(profile, point, "plan", unit_bytes)],
        "chosen": 0,
        "bound": [],
        "unit": unit,
        "unit_bytes": unit_bytes,
    })  # fmt: skip


def _write(profile: Profile, out: str | Path, title: str, data: dict[str, Any]) -> None:
    plotly = require_plotly()
    if profile.fake:
        title += f", modelled for {profile.device_name or profile.device}"
    unit_bytes = data["unit_bytes"]
    plain = timeline(profile, classic_plan(profile, "keep_all"))
    curve = memory_curve(plain, num_points=_NUM_POINTS, time_unit=time_unit_of(profile))
    data["plain"] = {
        "end": _rounded(curve.end),
        "peak": _rounded(plain.report.peak_bytes / unit_bytes),
        "peak_at": _rounded(curve.peak_at),
        "bytes": [_rounded(nbytes / unit_bytes) for nbytes in plain.total_bytes[curve.moments].tolist()],
    }
    data["categories"] = [
        {"name": name, "color": CATEGORY_COLORS[name], "meaning": meaning} for name, meaning in CATEGORIES.items()
    ]
    parts = {
        "title": html.escape(title),
        "note": html.escape(describe_profile(profile)),
        "style": _resource("page.css"),
        "script": _resource("page.js"),
        "plotly": _packed_plotly(),
        "plotly_version": html.escape(plotly.__version__),
        "data": _script_json(data),
    }
    # In one pass: inserted text is not searched for placeholders.
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _resource("page.html"))
    with writing(out):
        Path(out).write_text(page, encoding="utf-8")


def _script_json(data: dict[str, Any]) -> str:
    """Return JSON that is safe inside a script element, whatever text it contains."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _resource(name: str) -> str:
    return resources.files("recollect.pictures").joinpath(name).read_text(encoding="utf-8")


@cache
def _packed_plotly() -> str:
    """Return plotly.js, compressed from 4.8 MB to 1.9 MB."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


def _plan_entry(
    profile: Profile, point: FrontierPoint, group: str, unit_bytes: int, step_flags: Sequence[str] = ()
) -> dict[str, Any]:
    found = timeline(profile, point.plan)
    curve = memory_curve(found, num_points=_NUM_POINTS, time_unit=time_unit_of(profile))
    places = [found.where(int(moment)) for moment in curve.moments]
    names = list(dict.fromkeys(places))
    number_of = {name: number for number, name in enumerate(names)}
    name = point.name
    command, code = _next_steps(point, step_flags)
    headline = f"{format_bytes(point.peak_bytes)}, {percent(point.slowdown)} slower"
    bound = point.bound_slowdown
    has_bound = bound is not None and math.isfinite(bound)
    bound_text = f"no plan within this peak is below {percent(bound)}" if has_bound and bound is not None else ""
    text = str(point.plan)
    budget_bytes = point.plan.budget_bytes
    return {
        "name": name,
        "slug": _slug_of(name),
        "meaning": _meaning_of(name, point) if name else "",
        "command": command,
        "code": code,
        "group": group,
        "label": f"{name}: {headline}" if name else headline,
        "peak": point.peak_bytes / unit_bytes,
        "slowdown": _rounded(100 * point.slowdown),
        "bound_text": bound_text,
        "hover": [f"{name}: {headline}" if name else headline, *([bound_text] if bound_text else []), *_shortened(text)],
        "text": text,
        "where": f"{format_bytes(found.report.peak_bytes)}, {found.report.where}",
        "alive": _alive(found.report),
        "memory": {
            "end": _rounded(curve.end),
            "peak_at": _rounded(curve.peak_at),
            "budget": None if budget_bytes is None else [budget_bytes / unit_bytes, f"budget {format_bytes(budget_bytes)}"],
            "host": _series(found.host_bytes[curve.moments] / unit_bytes) if found.host_bytes.any() else None,
            "axis": curve.axis,
            "phases": [[span.name, _rounded(span.start), _rounded(span.end)] for span in curve.phases],
            "names": names,
            "places": [number_of[place] for place in places],
            "bytes": [_series(found.bytes_of[category][curve.moments] / unit_bytes) for category in CATEGORIES],
        },
    }  # fmt: skip


def _shortened(text: str) -> list[str]:
    """Return the first lines of a plan, cut to the width of a hover label."""
    lines = [line if len(line) <= _HOVER_COLUMNS else line[: _HOVER_COLUMNS - 1] + "…" for line in text.splitlines()]
    return lines if len(lines) <= _MOST_HOVER_LINES else [*lines[:_MOST_HOVER_LINES], "…"]


def _alive(report: PeakReport) -> list[dict[str, Any]]:
    groups = []
    for category, nbytes in report.by_category.items():
        items = [[item.name, format_bytes(item.nbytes)] for item in report.items if item.category == category]
        is_one = [name for name, _ in items] == [category]
        groups.append(
            {
                "category": list(CATEGORIES).index(category),
                "size": format_bytes(nbytes),
                "items": [] if is_one else items,
            }
        )
    return groups


def _series(values: Any) -> float | list[float]:
    rounded = [_rounded(float(value)) for value in np.asarray(values)]
    return rounded[0] if len(set(rounded)) == 1 else rounded


def _rounded(value: float) -> float:
    """Round to as many digits as are visible; whole numbers become integers, which are shorter."""
    short = float(f"{value:.{_DIGITS}g}")
    return int(short) if short.is_integer() else short


def _slug_of(name: str) -> str:
    """Return a name as it appears in the page's address.

    Example:
        >>> _slug_of("sqrt, every 6")
        'sqrt-every-6'
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _meaning_of(name: str, point: FrontierPoint) -> str:
    note = point.plan.note
    if point.keeps_all:
        return "keeps everything for backward and recomputes nothing"
    if name.startswith("plan "):
        return "the fastest plan that recollect found within this peak"
    if note == "full":
        return "keeps the input of each layer and recomputes the rest of it"
    if note.startswith("sqrt"):
        return f"keeps the input of every {_stride(note)}th layer: the square root of the number of layers, rounded"
    return f"keeps the input of every {_stride(note)}th layer".replace("2th", "2nd").replace("3th", "3rd")


def _next_steps(point: FrontierPoint, step_flags: Sequence[str]) -> tuple[str, str]:
    """Return the command that writes this plan, "" if there is none, and the code that trains with it."""
    note = point.plan.note
    amount = least_amount(point.peak_bytes)
    if point.keeps_all:
        return "", "# Nothing to do: train as you do now.\n"
    if note == "full":
        return "", 'plan = recollect.classic_plan(profile, "full")\nrecollect.apply(model, plan)\n'
    if stride := _stride(note):
        return "", f'plan = recollect.classic_plan(profile, "every_nth", n={stride})\nrecollect.apply(model, plan)\n'
    command = " ".join(["recollect plan", *step_flags, f"--memory-budget {amount} --out plan.json"])
    return command if step_flags else "", f'attached = recollect.attach(model, optimizer, budget="{amount}")\n'


def _stride(note: str) -> int:
    found = re.search(r"every (\d+)$", note)
    return int(found[1]) if found else 0
