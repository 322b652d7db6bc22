"""Pictures: curves lose no peak, the bound is nowhere too high, schedules are named, pages are safe."""

import json
import math
import pickle
import pickletools
import random
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz

import recollect
from hostile_names import EVIL, evil_profile
from recollect.errors import ArgumentError, RecollectError
from recollect.pictures.curves import memory_curve
from recollect.pictures.page import write_frontier_page, write_plan_page
from recollect.pictures.png import draw_frontier, draw_memory, frontier_figure
from recollect.pictures.style import CATEGORY_COLORS
from recollect.pictures.words import bound_corners, classics_of
from recollect.planning.bound import LowerBound
from recollect.planning.frontier import Frontier
from recollect.profile.profile import Profile
from recollect.simulation.timeline import CATEGORIES, Timeline
from small_llama import batch_of, llama


@pytest.fixture(scope="module")
def profile() -> Profile:
    model = llama()
    return recollect.record(model, batch_of(), optimizer=torch.optim.AdamW(model.parameters()), fake=True)


@pytest.fixture(scope="module")
def frontier(profile: Profile) -> Frontier:
    return recollect.frontier(profile)


@pytest.mark.parametrize("num_points", [7, 100, 5000])
def test_curve_has_the_peak_and_no_more(profile: Profile, num_points: int) -> None:
    for name in ("keep_all", "full"):
        found = recollect.timeline(profile, recollect.classic_plan(profile, name))  # type: ignore[arg-type]
        curve = memory_curve(found, num_points=num_points, time_unit=(1e-3, "ms"))
        total = found.total_bytes
        assert len(curve.moments) == len(curve.start) == num_points
        assert total[curve.moments].max() == found.report.peak_bytes
        assert 0 <= curve.peak_at <= curve.end
        at = np.searchsorted(curve.start, curve.peak_at, side="right") - 1
        assert total[curve.moments[at]] == found.report.peak_bytes or total[curve.moments[at - 1]] == total.max()
        # Time goes on: what a stretch shows is never before what an earlier one shows.
        assert np.all(np.diff(curve.moments) >= 0)


def test_bound_is_drawn_nowhere_too_high(profile: Profile, frontier: Frontier) -> None:
    bound, corners = LowerBound(profile), bound_corners(frontier.bound)
    x, y = zip(*corners, strict=True)
    assert list(x) == sorted(x)
    rng = random.Random(0)
    for _ in range(20):
        budget_bytes = rng.randint(math.ceil(x[0]), math.floor(x[-1]))
        # The linear programs are solved to 1e-6 of their value.
        assert np.interp(budget_bytes, x, y) <= bound.added_s(budget_bytes) / profile.step_s * (1 + 1e-5) + 1e-9
    for point in frontier.bound:
        if math.isfinite(point.slowdown) and point.budget_bytes > x[0]:
            assert np.interp(point.budget_bytes, x, y) == pytest.approx(point.slowdown, rel=1e-6, abs=1e-9)


def picture(path: Path) -> Any:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    return imread(path)


def test_frontier_png(profile: Profile, frontier: Frontier, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "frontier.png"
    draw_frontier(profile, frontier, out)
    pixels = picture(out)
    assert pixels.shape[:2] == (810, 1425)
    for color in ("#4477aa", "#aa3377", "#333333"):
        assert has_color(pixels, color), color
    (axes,) = frontier_figure(profile, frontier).axes
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names[:-1] == ["recollect", *(point.name for point in classics_of(frontier)), "keep all"]
    markers = [line.get_marker() for line in axes.lines if line.get_label() in names]
    assert len(set(markers)) == len(markers) > 3, "schedules can be told apart"


def has_color(pixels: Any, color: str) -> bool:
    wanted = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    # The picture has 256 colours; these differ by 40 steps of 8-bit colour or more.
    return bool((np.abs(pixels[..., :3] - wanted).max(axis=-1) < 4 / 255).any())


def test_memory_png_shows_each_category(profile: Profile, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "memory.png"
    plan = recollect.plan(profile, "80%")
    draw_memory(profile, plan, out)
    pixels = picture(out)
    assert pixels.shape[:2] == (870, 1650)
    at_peak = recollect.explain_peak(profile, plan).by_category
    for category in at_peak:
        assert has_color(pixels, CATEGORY_COLORS[category]), category


class Scripts(HTMLParser):
    """The elements of a page, and the text of its scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = (dict(attrs).get("id") or "main") if tag == "script" else ""

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.texts[self._inside] = self.texts.get(self._inside, "") + data


def parsed(page: Path) -> Scripts:
    scripts = Scripts()
    scripts.feed(page.read_text(encoding="utf-8"))
    return scripts


def data_of(page: Path) -> dict[str, Any]:
    return json.loads(parsed(page).texts["data"])


def test_names_cannot_break_the_page(profile: Profile, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    evil = evil_profile(profile)
    write_plan_page(evil, recollect.classic_plan(evil, "full"), tmp_path / "evil.html")
    write_plan_page(profile, recollect.classic_plan(profile, "full"), tmp_path / "good.html")
    found, expected = parsed(tmp_path / "evil.html"), parsed(tmp_path / "good.html")
    assert found.elements == expected.elements
    assert found.texts["main"] == expected.texts["main"]
    (plan,) = json.loads(found.texts["data"])["plans"]
    assert EVIL in "".join(plan["memory"]["names"])
    assert any(EVIL in name for group in plan["alive"] for name, _ in group["items"])


def test_page_asks_the_network_for_nothing(profile: Profile, frontier: Frontier, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    page = tmp_path / "page.html"
    write_frontier_page(profile, frontier, page)
    for tag, attributes in parsed(page).elements:
        for name in ("src", "href", "srcset", "action"):
            assert (attributes.get(name) or "data:").startswith("data:"), (tag, attributes)
    assert "default-src 'none'" in page.read_text(encoding="utf-8")
    # plotly.js alone is 4.8 MB; compressed 1.9.
    assert page.stat().st_size < 3_000_000


def test_page_holds_what_was_predicted(profile: Profile, frontier: Frontier, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    page = tmp_path / "page.html"
    write_frontier_page(profile, frontier, page)
    data = data_of(page)
    points = [*frontier.points, *classics_of(frontier)]
    assert len(data["plans"]) == len(points)
    for plan, point in zip(data["plans"], points, strict=True):
        assert plan["peak"] * data["unit_bytes"] == pytest.approx(point.peak_bytes)
        assert plan["slowdown"] == pytest.approx(100 * point.slowdown, rel=1e-4)
        assert plan["text"] == str(point.plan)
        memory = plan["memory"]
        series = [[b] * len(memory["places"]) if isinstance(b, int | float) else b for b in memory["bytes"]]
        # Five digits of each of ten categories.
        assert max(map(sum, zip(*series, strict=True))) == pytest.approx(plan["peak"], rel=1e-4)
    assert [category["name"] for category in data["categories"]] == list(CATEGORIES) == list(CATEGORY_COLORS)


def test_files_that_cannot_be_written_are_named(profile: Profile, frontier: Frontier, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("plotly")
    with pytest.raises(RecollectError, match=r"none.p.png: cannot be written \(no folder .*none\), expected"):
        draw_frontier(profile, frontier, tmp_path / "none" / "p.png")
    with pytest.raises(RecollectError, match=r"none.p.html: cannot be written \(no folder .*none\), expected"):
        write_plan_page(profile, frontier.points[0].plan, tmp_path / "none" / "p.html")


# The files that viewers read.


# What MemoryViz.js, the viewer of pytorch.org/memory_viz, can unpickle.
READ_BY_THE_VIEWER = frozenset(
    """
    APPEND APPENDS BINFLOAT BINGET BININT BININT1 BININT2 BINPUT BINUNICODE DICT EMPTY_DICT EMPTY_LIST EMPTY_TUPLE FRAME LIST
    LONG1 LONG_BINGET LONG_BINPUT MARK MEMOIZE NEWFALSE NEWTRUE NONE SETITEM SETITEMS SHORT_BINUNICODE STOP TUPLE TUPLE1
    TUPLE2 TUPLE3
    """.split()
)
# Of Chrome's trace format: what each kind of event has to have.
NEEDED = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "pid", "tid", "ts", "dur"},
    "C": {"name", "pid", "ts", "args"},
    "b": {"name", "cat", "id", "pid", "tid", "ts", "args"},
    "e": {"name", "cat", "id", "pid", "tid", "ts"},
}


@pytest.fixture(scope="module")
def over_time() -> Timeline:
    layers = [nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 8)) for _ in range(3)]
    net = nn.Sequential(nn.Linear(8, 8), *layers)
    optimizer = torch.optim.AdamW(net.parameters())
    profile = recollect.record(net, torch.zeros(256, 8), loss_fn=torch.sum, optimizer=optimizer, fake=True)
    return recollect.timeline(profile, recollect.plan(profile, "70%"))


@pytest.fixture(scope="module")
def snapshot(over_time: Timeline, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("snapshot") / "step.pickle"
    recollect.write_snapshot(over_time, path)
    (protocol, *others) = pickletools.genops(path.read_bytes())
    assert 2 <= (protocol[1] or 0) <= 4 and {opcode.name for opcode, _, _ in others} <= READ_BY_THE_VIEWER
    return pickle.loads(path.read_bytes())


@pytest.fixture(scope="module")
def events(over_time: Timeline, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("trace") / "step.json"
    recollect.write_trace(over_time, path)
    return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


def test_torch_reads_the_snapshot(over_time: Timeline, snapshot: Any) -> None:
    assert "total_allocated:" in _memory_viz.segsum(snapshot)
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "MemoryViz.js" in plot(snapshot)
    assert _memory_viz.trace(snapshot).startswith("Device 0")
    names: list[str] = []
    _memory_viz.memory(snapshot, format_flamegraph=lambda text: names.append(text) or "")
    assert "before the step:0:optimizer state" in names[0]


def test_the_snapshot_has_the_bytes_of_the_prediction(over_time: Timeline, snapshot: Any) -> None:
    (trace,) = snapshot["device_traces"]
    alive: dict[int, int] = {}
    peak, ends = 0, dict[int, int]()
    for event in trace:
        if event["action"] == "alloc":
            start, end = event["addr"], event["addr"] + event["size"]
            assert not any(start < other + size and other < end for other, size in alive.items())
            alive[start] = event["size"]
        elif event["action"] == "free_completed":
            assert alive.pop(event["addr"]) == event["size"]
        peak = max(peak, sum(alive.values()))
        ends[event["time_us"]] = sum(alive.values())
    assert peak == over_time.report.peak_bytes
    (segment,) = snapshot["segments"]
    assert {b["address"]: b["size"] for b in segment["blocks"] if b["state"] == "active_allocated"} == alive
    assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"] >= peak
    categories = Counter(event["category"] for event in trace if "category" in event)
    # The viewer's code fails without the last.
    assert set(categories) <= {*CATEGORIES, "unknown"} and categories["unknown"] == 1


def test_the_snapshot_names_values_by_unit(snapshot: Any) -> None:
    stacks = [event["frames"] for event in snapshot["device_traces"][0] if event["action"] == "alloc"]
    named = {(frames[0]["filename"], frames[0]["name"], frames[-1]["name"]) for frames in stacks}
    assert ("1 (Sequential)", "2.bernoulli_ (Dropout)", "kept values") in named
    assert ("before the step", "parameters", "parameters") in named
    assert any(unit == "2 (Sequential)" and what == "recomputed values" for unit, _, what in named)
    line = next(frames[0]["line"] for frames in stacks if frames[0]["name"] == "1 (GELU)")
    assert line == 2  # the second op of the unit


def test_the_trace_is_of_the_format(events: list[dict[str, Any]]) -> None:
    for event in events:
        assert NEEDED[event["ph"]] <= event.keys()
        assert event["ph"] == "M" or event["ts"] >= 0 and event.get("dur", 0) >= 0
    # Each value begins and ends once; and slices of one thread do not overlap, which viewers would not draw.
    begins = {event["id"]: event["ts"] for event in events if event["ph"] == "b"}
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "e"}
    assert begins.keys() == ends.keys() and all(begins[one] <= ends[one] for one in begins)
    threads: dict[tuple[int, int], float] = {}
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        thread = event["pid"], event["tid"]
        assert event["ts"] >= threads.get(thread, 0.0) - 1e-6  # times are sums of floats, in microseconds
        threads[thread] = event["ts"] + event["dur"]


def test_the_trace_shows_values_and_recompute_by_unit(over_time: Timeline, events: list[dict[str, Any]]) -> None:
    name_of = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(name_of.values()) == [
        "step of Sequential", "0 (Linear)", "1 (Sequential)", "2 (Sequential)", "3 (Sequential)", "outside of the units",
    ]  # fmt: skip
    again = [name_of[e["pid"]] for e in events if e["ph"] == "X" and name_of[e["pid"]] != "step of Sequential"]
    assert len(again) == len(over_time.lives.reruns) > 0
    twice = Counter((e["name"], name_of[e["pid"]], e["cat"]) for e in events if e["ph"] == "b")
    recomputed = {(name, unit) for name, unit, category in twice if category == "recomputed values"}
    assert recomputed and all(
        any(key[:2] == one and key[2] != "recomputed values" for key in twice) for one in recomputed
    )
    alive = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["name"] == "bytes alive: all"]
    assert max(alive) == over_time.report.peak_bytes
    assert {e["name"] for e in events if e["pid"] == 1 and e.get("tid") == 1 and e["ph"] == "X"} >= {
        "forward",
        "backward",
    }


@pytest.mark.parametrize("write", [recollect.write_trace, recollect.write_snapshot])
def test_what_cannot_be_written(over_time: Timeline, write: Any, tmp_path: Path) -> None:
    with pytest.raises(RecollectError, match=r"none.step\.json: cannot be written \(no folder .*none\), expected"):
        write(over_time, tmp_path / "none" / "step.json")
    with pytest.raises(ArgumentError, match=r"over_time.*Profile"):
        write(over_time.profile, tmp_path / "step.json")
    assert isinstance(over_time.profile, Profile)
