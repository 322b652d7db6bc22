"""A real browser without a window, for pages that were written to a file."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
# Nothing but the page: no updates, no sync, no first-run pages.
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


@contextmanager
def open_browser(user_data: Path) -> Iterator[Any]:
    """Start Chromium with an empty profile folder; its log and its network traffic can be asked for."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in (*_FLAGS, f"--user-data-dir={user_data}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = Chrome(options=options, service=Service(DRIVER))
    try:
        yield browser
    finally:
        browser.quit()


def show(browser: Any, page: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
    """Open a page in a window of this size and wait until it has drawn itself."""
    from selenium.webdriver.support.ui import WebDriverWait

    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    browser.get(page.resolve().as_uri())
    WebDriverWait(browser, 60, poll_frequency=0.02).until(
        lambda b: b.execute_script("return document.body.dataset.ready") == "yes"
    )


def requests(browser: Any) -> list[str]:
    """Return what was asked of the network since the last call: no files, nothing of the page or the browser itself."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    return [
        url for url in urls if not url.startswith(("file:", "data:", "blob:", "chrome:", "chrome-untrusted:", "about:"))
    ]


def screenshot(browser: Any, out: Path) -> None:
    """Write a picture of the whole page, however long."""
    import base64

    size = browser.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
    clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
    out.write_bytes(base64.b64decode(shot["data"]))


def clipped_texts(browser: Any) -> list[str]:
    """Return the visible texts that a reader cannot see whole, and cannot scroll to: cut off by their box, or by the window."""
    return browser.execute_script(
        """
        const cut = [];
        for (const one of document.querySelectorAll("body *")) {
            const box = one.getBoundingClientRect(), style = getComputedStyle(one);
            const has_text = [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
            if (!has_text || !box.width || style.visibility !== "visible") continue;
            const outside = box.left < 0 || box.right > innerWidth + 0.5;
            const boxed = ["hidden", "clip"].includes(style.overflowX) && one.scrollWidth > one.clientWidth + 1;
            const scrolls = one.closest("pre, select") !== null;
            if ((outside || boxed) && !scrolls) cut.push(`${one.tagName}: ${one.textContent.slice(0, 60)}`);
        }
        return cut;
        """
    )


def pale_texts(browser: Any, least: float = 4.5) -> list[str]:
    """Return the visible texts whose contrast to what is behind them is less than WCAG's least for small text, with it.

    Texts of charts are compared with the page, not with what is drawn below them; signs without a letter are no texts.
    """
    return browser.execute_script(
        """
        const channels = (color) => color.match(/[\\d.]+/g).map(Number);
        const light = (color) => {
            const linear = (c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
            const [r, g, b] = channels(color).map((c) => linear(c / 255));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const behind = (one) => {
            const own = getComputedStyle(one).backgroundColor, [, , , alpha = 1] = channels(own);
            return alpha > 0 ? own : one.parentElement ? behind(one.parentElement) : "rgb(255, 255, 255)";
        };
        const pale = [];
        for (const one of document.querySelectorAll("body *")) {
            const style = getComputedStyle(one), box = one.getBoundingClientRect();
            const has_text = [...one.childNodes].some((node) => node.nodeType === 3 && /[\\p{L}\\d]/u.test(node.data));
            if (!has_text || !box.width || style.visibility !== "visible") continue;
            const ink = one instanceof SVGElement ? style.fill : style.color;
            const [a, b] = [light(ink), light(behind(one))];
            const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
            if (contrast < arguments[0]) pale.push(`${contrast.toFixed(1)}: ${one.textContent.slice(0, 60)}`);
        }
        return pale;
        """,
        least,
    )
