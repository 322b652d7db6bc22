"""Check the flags `--png` and `--html` before the work begins, as recording can take minutes."""

from __future__ import annotations

from pathlib import Path

from recollect.cli.output import check_folder
from recollect.pictures.page import require_plotly
from recollect.pictures.style import require_matplotlib

__all__ = ["check_pictures"]


def check_pictures(png: Path | None, html: Path | None) -> None:
    """Check that the requested pictures can be made.

    Raises:
        RecollectError: a package or the file's folder is missing.
    """
    if png is not None:
        require_matplotlib()
    if html is not None:
        require_plotly()
    for flag, path in (("--png", png), ("--html", html)):
        if path is not None:
            check_folder(path, flag)
