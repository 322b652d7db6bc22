"""What the documentation quotes is what its commands make now, as far as that is checked in a few seconds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))

from pages import figures  # noqa: E402
from pages.figures import Dated, Exact, Figure  # noqa: E402
from pages.registry import FIGURES  # noqa: E402
from pages.stale import stale  # noqa: E402


def test_nothing_that_is_quick_to_check_is_stale() -> None:
    assert [one.name for one in stale(quick=True)] == [], "run: scripts/stale --refresh"


def test_every_picture_is_checked() -> None:
    pictures = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.[ps][nv]g")}
    assert pictures <= {one.path for one in FIGURES}


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "DIGESTS", tmp_path / "figures.json")
    (tmp_path / "rows.csv").write_text("1\n")
    path = tmp_path / "page.md"
    path.write_text("one\ntwo\n")
    return path


def test_an_exact_figure_is_stale_when_its_page_says_something_else(page: Path) -> None:
    whole = Exact("page.md", "echo", lambda: "one\ntwo\n")
    part = Exact("page.md", "echo", lambda: "two", whole=False)
    assert not whole.is_stale() and not part.is_stale()
    page.write_text("one\n")
    assert stale((whole, part)) == [whole, part]


def test_a_dated_figure_is_stale_when_it_or_its_rows_have_changed(page: Path) -> None:
    figure: Figure = Dated("page.md", "echo", ("rows.csv",))
    assert isinstance(figure, Dated)
    assert figure.is_stale(), "nobody has accepted it yet"
    for path in (page, page.parent / "rows.csv"):
        figure.accept()
        assert not figure.is_stale()
        path.write_text(path.read_text() + "more\n")
        assert figure.is_stale()


def test_inputs_that_are_not_there_are_an_error(page: Path) -> None:
    with pytest.raises(FileNotFoundError, match="page.md: nothing matches gone.csv"):
        Dated("page.md", "echo", ("gone.csv",)).is_stale()
