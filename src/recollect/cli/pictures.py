"""The flags `--png` and `--html`, looked at before the work begins: recording can take minutes."""

from __future__ import annotations

from pathlib import Path

from recollect.errors import RecollectError
from recollect.pictures.page import require_plotly
from recollect.pictures.style import require_matplotlib

__all__ = ["check_pictures"]


def check_pictures(png: Path | None, html: Path | None) -> None:
    """Check that the pictures that were asked for can be made.

    Raises:
        RecollectError: a package is missing, or there is no folder for the file.
    """
    if png is not None:
        require_matplotlib()
    if html is not None:
        require_plotly()
    for flag, path in (("--png", png), ("--html", html)):
        if path is not None and not path.parent.is_dir():
            raise RecollectError(
                f"{flag} {path}: cannot be written (no folder {path.parent}), expected a file in a writable folder."
            )
