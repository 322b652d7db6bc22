"""The Python on every page of the documentation runs as it stands there."""

from __future__ import annotations

from pathlib import Path

import pytest

import guide_pages
from forked_processes import run_forked
from guide_pages import CONTINUED, DOCS, PREPARED, blocks

pytestmark = pytest.mark.integration

NEEDS = {"lightning.md": ("lightning",), "peft_trl.md": ("trl", "peft"), "hugging_face.md": ("accelerate",)}
# Each of their tools has a file in examples/ with these lines, which test_examples.py runs.
IN_EXAMPLES = {"trainers.md"}
# Its one line is that of get_started.md.
FRONT = "index.md"


@pytest.mark.parametrize("page", sorted(set(PREPARED) - CONTINUED))  # test_readme.py runs the others
def test_the_python_of_a_page_runs(page: str) -> None:
    for package in NEEDS.get(page, ()):
        pytest.importorskip(package)
    done = run_forked(Path(guide_pages.__file__), page)
    assert done.returncode == 0, done.stderr
    missing = [
        line for line, _ in blocks((DOCS / page).read_text(encoding="utf-8")) if f"{page}:{line} ran" not in done.stdout
    ]
    assert not missing, done.stderr


def test_no_page_is_left_out() -> None:
    with_python = {path.name for path in DOCS.glob("*.md") if blocks(path.read_text(encoding="utf-8"))}
    assert with_python - {FRONT} == set(PREPARED) - {"../README.md"} | IN_EXAMPLES


def test_blocks_are_found() -> None:
    page = "a\n```python\nx = 1\n```\n\n- b\n\n  ```python\n  y = 2\n  ```\n```\nz\n```\n"
    assert blocks(page) == [(3, "x = 1\n"), (9, "y = 2\n")]
