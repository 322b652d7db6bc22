"""The site builds without a warning, has every page and every public name, and fetches nothing from the network."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import recollect

ROOT = Path(__file__).parents[2]
PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
sys.path.append(str(ROOT))

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")

from pages.api import PAGE, TOPICS, page  # noqa: E402

from browser import CHROMIUM, DRIVER, open_browser, requests  # noqa: E402


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site; `strict` in mkdocs.yml makes links and pages that lead nowhere, and pages that are in no menu, an error."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + "\nEvery page of docs/ must be under `nav` in mkdocs.yml."
    return out


PRIVATE_INTEGRATIONS = {"nearest", "trainers"}


def public_names() -> set[str]:
    """What `recollect` offers, and each of its integrations."""
    found = {f"recollect.{name}" for name in recollect.__all__}
    folder = ROOT / "src" / "recollect" / "integrations"
    for path in [*folder.glob("[!_]*.py"), *folder.glob("*/__init__.pyi")]:
        module = path.stem if path.suffix == ".py" else path.parent.name
        if module not in PRIVATE_INTEGRATIONS:
            text = path.read_text(encoding="utf-8")
            listed = "".join(re.findall(r"^__all__ = \[(.*?)\]", text, re.MULTILINE | re.DOTALL))
            offered = {*re.findall(r'"(\w+)"', listed), *re.findall(r"import (\w+) as \1$", text, re.MULTILINE)}
            assert offered, f"{path} offers nothing"
            found |= {f"recollect.integrations.{module}.{name}" for name in offered - set(recollect.__all__)}
    return found


def test_no_public_name_is_missing_from_the_reference() -> None:
    assert {name for names in TOPICS.values() for name in names} == public_names(), "mend TOPICS in pages/api.py"
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m pages.api"


def test_the_reference_has_signature_and_example_of_each_function(site: Path) -> None:
    html = (site / "api.html").read_text(encoding="utf-8")
    markers = re.findall(r"<!-- api: ([\w.]+) -->", PAGE.read_text(encoding="utf-8"))
    assert [name for name in markers if f'id="{name}"' not in html] == []
    assert html.count("Examples:") >= len(TOPICS["Step by step"])


def test_links_out_of_the_docs_lead_to_pages_of_the_site(site: Path) -> None:
    pages = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    assert {"index.html", "CONTRIBUTING.html", "source/src/recollect/replay.py.html"} <= pages
    assert 'href="usage.html"' in (site / "index.html").read_text(encoding="utf-8")


def test_nothing_is_fetched_from_the_network(site: Path) -> None:
    tags = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?https?://[^\s\">]*")
    found = {path.name: tags.findall(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    assert {name: urls for name, urls in found.items() if urls} == {}


needs_browser = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="needs Chromium and chromedriver, which are not installed"
)


@needs_browser
def test_on_a_phone_the_budget_of_the_front_page_is_in_sight(site: Path, tmp_path: Path) -> None:
    pytest.importorskip("selenium")
    with open_browser(tmp_path) as browser:
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
        browser.get((site / "index.html").as_uri())
        code, icons = browser.execute_script(
            "return [[...document.querySelectorAll('.hero pre > code')].map(one => one.scrollWidth - one.clientWidth),"
            "[...document.querySelectorAll('.md-clipboard')].filter(one => one.offsetParent).length]"
        )
        assert len(code) == 3 and max(code) <= 0 and icons == 0


@needs_browser
def test_the_search_works_in_a_folder(site: Path, tmp_path: Path) -> None:
    pytest.importorskip("selenium")
    from selenium.webdriver.support.ui import WebDriverWait

    with open_browser(tmp_path) as browser:
        browser.get((site / "index.html").as_uri())
        browser.execute_script("document.querySelector('label[for=__search]').click()")
        wait = WebDriverWait(browser, 60, ignored_exceptions=[Exception])
        wait.until(lambda b: b.find_element("css selector", ".md-search__input").send_keys("fragmentation") is None)
        wait.until(lambda b: b.find_elements("css selector", ".md-search-result__item"))
        assert "out_of_memory.html" in browser.find_element("css selector", ".md-search-result__list").get_attribute(
            "innerHTML"
        )
        assert requests(browser) == []
