"""Each text rule on a real text; the first lines of a file say where it is from, and what is to be found in it."""

import re
from pathlib import Path

import pytest

import recollect

TEXTS = sorted((Path(__file__).parent / "texts").glob("*.txt"))


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_text(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    expected = re.search(r"^# finds: (.+)$", text, re.MULTILINE)
    assert text.startswith("# source: ")
    found = recollect.diagnose(path)
    assert {finding.rule for finding in found} == set(expected[1].split(", "))
    for finding in found:
        assert finding.evidence[0].startswith(str(path))
        assert "{" not in finding.problem.replace('{"', ""), "a number that was not filled in"
