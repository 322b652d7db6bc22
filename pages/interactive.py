"""The picture of the interactive page: `python -m pages.interactive` writes the page, opens it in Chromium and draws it."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from pages.figures import ROOT, output_of

__all__ = ["COMMAND", "draw"]

# As docs/get_started.md has it.
COMMAND = "recollect frontier --size 1b --fake --hardware H100 --dtype bf16 --seq-length 2048"
_PICTURE = ROOT / "docs" / "interactive.png"
_WIDTH, _HEIGHT = 1180, 1000


def draw(picture: Path = _PICTURE) -> None:
    """Write a picture of the page as it opens.

    Raises:
        FileNotFoundError: there is no Chromium.
    """
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise FileNotFoundError("chromium: a browser draws the page; install it, or google-chrome")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "frontier.html")
        output_of(f"{COMMAND} --html {page}")
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/profile",
        ]
        size = [f"--window-size={_WIDTH},{_HEIGHT}", "--virtual-time-budget=20000", f"--screenshot={picture}"]
        subprocess.run([chromium, *flags, *size, page.as_uri()], check=True, capture_output=True)


if __name__ == "__main__":
    draw()
