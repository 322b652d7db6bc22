"""Pictures: curves lose no peak, the bound is nowhere too high, labels find room, pages are safe."""

import itertools
import json
import math
import random
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import recollect
from hostile_names import EVIL, evil_profile
from recollect.errors import RecollectError
from recollect.pictures.curves import memory_curve
from recollect.pictures.page import write_frontier_page, write_plan_page
from recollect.pictures.png import Mark, draw_frontier, draw_memory, place_labels
from recollect.pictures.style import CATEGORY_COLORS, new_figure
from recollect.pictures.words import bound_corners, classics_of
from recollect.planning.bound import LowerBound
from recollect.planning.frontier import Frontier
from recollect.profile.profile import Profile
from recollect.simulation.timeline import CATEGORIES
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


def test_labels_stay_inside_and_apart() -> None:
    pytest.importorskip("matplotlib")
    figure, axes = new_figure(9, 5)
    # At each edge, and four in a heap.
    heap = [Mark(0.5 + 0.01 * i, 0.5 + 0.02 * (i % 2), f"schedule {i}") for i in range(4)]
    marks = [
        Mark(0, 0, "bottom left"),
        Mark(1, 0, "bottom right"),
        Mark(0, 1, "top left"),
        Mark(1, 1, "top right"),
        *heap,
    ]
    axes.set(xlim=(0, 1), ylim=(0, 1))
    place_labels(figure, axes, marks)
    renderer = figure.canvas.get_renderer()
    boxes = [text.get_window_extent(renderer) for text in axes.texts]
    assert len(boxes) == len(marks)
    for box in boxes:
        assert axes.bbox.x0 <= box.x0 <= box.x1 <= axes.bbox.x1
        assert axes.bbox.y0 <= box.y0 <= box.y1 <= axes.bbox.y1
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


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
