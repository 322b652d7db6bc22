"""What the documentation quotes is what its commands make now, as far as that is checked in a few seconds."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))

from pages.registry import FIGURES  # noqa: E402
from pages.stale import stale  # noqa: E402


def test_nothing_that_is_quick_to_check_is_stale() -> None:
    assert [one.name for one in stale(quick=True)] == [], "run: scripts/stale --refresh"


def test_every_picture_is_checked() -> None:
    pictures = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.[ps][nv]g")}
    assert pictures <= {one.path for one in FIGURES}
