"""What the README and the page for newcomers quote is what their Python prints; `test_guides.py` runs their commands."""

import re
from pathlib import Path

import pytest

import guide_pages
from forked_processes import run_forked
from guide_pages import DOCS

PAGES = ("../README.md", "get_started.md")
# What differs from run to run, as it rests on measured times; peaks, counts and shapes are the same wherever it runs.
TIMED = re.compile(
    r"-?\+?\d+(\.\d+)? ?%( \([\d.]+ to [\d.]+[^)%]*\))?|in \d rounds(: times too noisy to judge it by)?|planned .*|"
    r"(predicted )?peak \S+ MiB, step \+|predicted \S+ MiB, (measured|within) .*|peak with plan.*"
)


def quoted(page: str, beginning: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return [line.strip() for line in text.splitlines() if line.strip().startswith(beginning)]


@pytest.mark.parametrize("page", [PAGES[0], pytest.param(PAGES[1], marks=pytest.mark.long)])
def test_what_is_quoted_is_what_is_printed(page: str) -> None:
    done = run_forked(Path(guide_pages.__file__), page)
    printed = done.stdout + done.stderr
    assert "Traceback" not in printed, printed
    lines = {TIMED.sub("", line) for line in printed.splitlines()}
    for beginning in ("recollect: 1", "gradients  ", "peak without ", "peak with plan ", "slowdown  "):
        found = quoted(page, beginning)
        assert found and {TIMED.sub("", line) for line in found} <= lines, (beginning, printed)
