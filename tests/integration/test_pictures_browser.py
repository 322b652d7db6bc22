"""The page in a real browser: it draws, answers hover, click and keys, at any width, light and dark, and needs no network."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import recollect
from browser import CHROMIUM, DRIVER, clipped_texts, open_browser, pale_texts, requests, screenshot, show
from hostile_names import evil_profile
from recollect.byte_format import least_amount
from recollect.pictures.page import write_frontier_page
from recollect.planning.frontier import Frontier
from recollect.profile.profile import Profile
from small_llama import batch_of, llama

pytest.importorskip("plotly")
pytest.importorskip("selenium")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="needs Chromium and chromedriver, which are not installed"
)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return recollect.record(llama(), batch_of(), fake=True)


@pytest.fixture(scope="module")
def frontier(profile: Profile) -> Frontier:
    return recollect.frontier(profile)


@pytest.fixture(scope="module")
def page(profile: Profile, frontier: Frontier, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "frontier.html"
    write_frontier_page(profile, frontier, out, step_flags=["--size", "tiny"])
    return out


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with open_browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


def problems(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser")]


def point_at(browser: Any, chart: str, x: float, y: float) -> tuple[float, float]:
    """Where a point of the data is in the window; scrolls there."""
    return tuple(
        browser.execute_script(
            """
            const chart = document.getElementById(arguments[0]);
            chart.scrollIntoView({block: "center"});
            const frame = chart._fullLayout, box = chart.getBoundingClientRect();
            return [box.left + frame.xaxis._offset + frame.xaxis.l2p(arguments[1]),
                    box.top + frame.yaxis._offset + frame.yaxis.l2p(arguments[2])];
            """,
            chart,
            x,
            y,
        )
    )


def move_to(browser: Any, x: float, y: float, *, click: bool = False) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.actions.action_builder import ActionBuilder

    actions = ActionBuilder(browser)
    actions.pointer_action.move_to_location(round(x) - 3, round(y))
    actions.pointer_action.move_to_location(round(x), round(y))
    if click:
        actions.pointer_action.click()
    actions.perform()
    ActionChains(browser).pause(0.3).perform()


def hover_text(browser: Any) -> str:
    from selenium.webdriver.support.ui import WebDriverWait

    script = """
        const tip = document.getElementById("tip");
        return tip.hidden ? "" : tip.textContent;
    """
    return str(WebDriverWait(browser, 10, poll_frequency=0.02).until(lambda b: b.execute_script(script)))


def shown(browser: Any) -> str:
    return str(browser.execute_script("return document.getElementById('reading').textContent"))


@pytest.mark.parametrize("width", [1280, 320])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_page_draws_itself(browser: Any, page: Path, tmp_path: Path, width: int, dark: bool) -> None:
    show(browser, page, width=width, dark=dark)
    assert problems(browser) == []
    assert requests(browser) == []
    # Nothing sticks out: the page cannot be scrolled sideways.
    assert browser.execute_script("return document.documentElement.scrollWidth") == width
    assert clipped_texts(browser) == []
    assert pale_texts(browser) == []
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(22, 24, 27)" if dark else "rgb(255, 255, 255)")
    num_traces = browser.execute_script(
        "return ['frontier', 'memory'].map(id => document.querySelectorAll(`#${id} .scatterlayer .trace`).length)"
    )
    assert min(num_traces) >= 4
    screenshot(browser, tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


def test_hover_reads_the_plan(browser: Any, page: Path, frontier: Frontier) -> None:
    show(browser, page)
    point = frontier.points[3]
    unit_bytes = browser.execute_script("return JSON.parse(document.getElementById('data').textContent).unit_bytes")
    move_to(browser, *point_at(browser, "frontier", point.peak_bytes / unit_bytes, 100 * point.slowdown))
    text = hover_text(browser)
    assert f"{100 * point.slowdown:.1f} % slower" in text
    assert "no plan within this peak is below" in text
    assert "layers." in text
    assert problems(browser) == []


def test_hover_reads_the_memory(browser: Any, page: Path) -> None:
    show(browser, page)
    end = browser.execute_script("return document.getElementById('memory')._fullLayout.xaxis.range[1]")
    move_to(browser, *point_at(browser, "memory", end * 0.6, 0.1))
    text = hover_text(browser)
    assert "MiB, backward of decoder.layers." in text
    assert " KiB  parameters" in text
    assert problems(browser) == []


def test_click_changes_the_memory(browser: Any, page: Path, frontier: Frontier) -> None:
    show(browser, page)
    total = "return document.getElementById('memory').data.at(-4).y.join()"
    before, reading = browser.execute_script(total), shown(browser)
    point = frontier.points[-3]
    unit_bytes = browser.execute_script("return JSON.parse(document.getElementById('data').textContent).unit_bytes")
    move_to(browser, *point_at(browser, "frontier", point.peak_bytes / unit_bytes, 100 * point.slowdown), click=True)
    assert shown(browser) != reading
    assert f"{100 * point.slowdown:.1f} % slower" in shown(browser)
    assert browser.execute_script(total) != before
    assert browser.execute_script("return document.getElementById('text').textContent") == str(point.plan)
    assert problems(browser) == []


@pytest.mark.parametrize(
    ("chart", "width"),
    [
        ("frontier", 320),
        ("memory", 1280),
        pytest.param("frontier", 1280, marks=pytest.mark.long),
        pytest.param("memory", 320, marks=pytest.mark.long),
    ],
)
def test_tip_is_fixed_width_and_within_the_window(browser: Any, page: Path, chart: str, width: int) -> None:
    show(browser, page, width=width, height=560, dark=True)
    for share in (0.02, 0.5, 0.98):
        x, y = browser.execute_script(
            "const p = document.getElementById(arguments[0]).data.find(t => t.hoverinfo === 'none');"
            "const i = Math.floor(p.x.length * arguments[1]); return [p.x[i], p.y[i]]",
            chart,
            share,
        )
        across, down = point_at(browser, chart, x, y)
        move_to(browser, across, down - 2)  # what lies on an axis is hovered from above it
        assert hover_text(browser)
        left, right, top, bottom, font = browser.execute_script(
            "const tip = document.getElementById('tip'), box = tip.getBoundingClientRect();"
            "return [box.left, box.right, box.top, box.bottom, getComputedStyle(tip).fontFamily]"
        )
        assert 0 <= left < right <= width and 0 <= top < bottom <= 560, (share, left, right, top, bottom)
        assert "monospace" in font
        assert pale_texts(browser) == []
    assert problems(browser) == []


def test_page_says_what_to_do_next(browser: Any, page: Path, frontier: Frontier) -> None:
    """The code of the chosen plan is a click away, and the address names the plan."""
    from selenium.webdriver.support.ui import Select, WebDriverWait

    show(browser, page)
    Select(browser.find_element("id", "plan")).select_by_index(2)
    amount = least_amount(frontier.points[2].peak_bytes)
    code = browser.find_element("id", "code").text
    assert code == f'attached = recollect.attach(model, optimizer, budget="{amount}")'
    assert f"--size tiny --memory-budget {amount} --out plan.json" in browser.find_element("id", "command").text
    button = browser.find_element("css selector", "[data-copies=code]")
    button.click()
    WebDriverWait(browser, 60).until(lambda _: button.text in ("Copied", "Selected"))
    assert browser.current_url.endswith("#plan-3")
    browser.refresh()
    WebDriverWait(browser, 60).until(lambda b: b.execute_script("return document.body.dataset.ready") == "yes")
    assert browser.find_element("id", "code").text == code
    assert browser.find_element("id", "meaning").text.startswith("plan 3: the fastest plan")
    assert ", modelled for " in browser.title
    assert problems(browser) == []


def test_keys_choose_a_plan(browser: Any, page: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    show(browser, page)
    before = shown(browser)
    chooser = browser.find_element("id", "plan")
    chooser.send_keys(Keys.ARROW_DOWN)
    assert shown(browser) != before
    rows = browser.execute_script("return document.querySelectorAll('#alive tbody tr').length")
    assert rows >= 4


def test_names_are_text(browser: Any, profile: Profile, frontier: Frontier, tmp_path: Path) -> None:
    evil = evil_profile(profile)
    write_frontier_page(evil, recollect.frontier(evil), tmp_path / "evil.html")
    show(browser, tmp_path / "evil.html")
    assert problems(browser) == []
    assert requests(browser) == []
    assert browser.execute_script("return document.querySelectorAll('img').length") == 0
    assert "</script><script>alert(1)" in browser.execute_script("return document.querySelector('h1').textContent")
    end = browser.execute_script("return document.getElementById('memory')._fullLayout.xaxis.range[1]")
    move_to(browser, *point_at(browser, "memory", end * 0.6, 0.1))
    assert "<img src=x onerror=alert(2)>" in hover_text(browser)
    assert problems(browser) == []
