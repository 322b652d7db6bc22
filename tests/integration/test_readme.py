"""Every command of the README and of the page for newcomers can be pasted, and prints what is quoted."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import guide_pages
from forked_processes import run_forked
from guide_pages import DOCS

pytestmark = pytest.mark.integration

PAGES = ("../README.md", "get_started.md")
INSTALLS = "pip install "
# What differs from run to run, as it rests on measured times; peaks, counts and shapes are the same wherever it runs.
TIMED = re.compile(
    r"-?\+?\d+(\.\d+)? ?%( \([\d.]+ to [\d.]+[^)%]*\))?|in \d rounds|planned .*|(predicted )?peak \S+ MiB, step \+|"
    r"predicted \S+ MiB, (measured|within) .*|peak with plan.*"
)


def commands(page: str) -> list[str]:
    """The command lines of a page; one that is broken by a backslash is one."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line]


def quoted(page: str, beginning: str) -> list[str]:
    """The lines of output on a page that begin so."""
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


@pytest.mark.parametrize("page", PAGES)
def test_no_command_is_cut_short(page: str) -> None:
    found = commands(page)
    assert found and not [line for line in found if "..." in line or not shlex.split(line)]


def runs(page: str, slow: tuple[str, ...]) -> list[object]:
    lines = [line for line in commands(page) if not line.startswith(INSTALLS)]
    return [pytest.param(line, marks=[pytest.mark.long] * any(word in line for word in slow)) for line in lines]


@pytest.mark.parametrize("line", [*runs(PAGES[0], ("70b", "torchrun")), *runs(PAGES[1], ("frontier",))])
def test_a_command_runs(line: str, tmp_path: Path) -> None:
    program, *words = shlex.split(line)
    if program == "torchrun":
        done = run_forked("torch.distributed.run", *words, cwd=tmp_path)
    else:
        assert program == "recollect"
        done = run_forked("recollect", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
