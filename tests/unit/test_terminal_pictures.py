"""Pictures of terminals: what a terminal is left with, as SVG that needs nothing else."""

import doctest
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))

from pages import terminal  # noqa: E402
from pages.registry import FIGURES  # noqa: E402


def test_the_examples_of_the_docstrings_run() -> None:
    assert doctest.testmod(terminal).failed == 0


def test_every_command_has_its_pictures_and_each_is_checked() -> None:
    drawn = {terminal.picture_of(name, width) for name in terminal.COMMANDS for width in terminal.WIDTHS}
    assert drawn == set((ROOT / "docs" / "terminal").glob("*.svg"))
    assert {path.relative_to(ROOT).as_posix() for path in drawn} <= {one.path for one in FIGURES}
    page = (ROOT / "docs" / "terminal.md").read_text(encoding="utf-8")
    assert all(f"(terminal/{path.name})" in page for path in drawn)


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "terminal").glob("*.svg")), ids=lambda path: path.stem)
def test_pictures_are_small_and_need_nothing_from_elsewhere(path: Path) -> None:
    svg = path.read_text(encoding="utf-8")
    assert len(svg) < 40_000
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "").replace("https://www.textualize.io", "")
    texts = [element.text or "" for element in ET.fromstring(svg).iter() if element.tag.endswith("text")]
    width = int(path.stem.rpartition("-")[2])
    assert any(text.startswith("$") for text in texts)
    assert max(len(text) for text in texts) <= width
    assert "…" not in svg


def test_a_command_is_typed_over_lines_that_a_shell_joins() -> None:
    typed = terminal._as_typed("recollect plan " + "--flag value " * 12, 60)
    assert all(len(line) <= 60 for line in typed.splitlines())
    assert typed.count(" \\\n") == len(typed.splitlines()) - 1
    assert not any(line.strip().startswith("value") for line in typed.splitlines())
