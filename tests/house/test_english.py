"""Phrases of translated English that the pages and sources do without. CONTRIBUTING.md asks for plain English."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for path in (ROOT / "src").rglob("*") if path.suffix in {".py", ".pyi", ".yaml", ".js"})
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "log.md")]
# A phrase may be broken between lines, comments or parts of a string.
GAP = r"[\s#]+|\"\s*f?\""
INSTEAD = {
    ", so that": "two sentences, or so, which, to",
    "for ever": "forever, or deadlocks",
    "anew": "again",
    "no amount of": "not an amount of",
    "is no": "is not a; 'there is no' is fine",
    "in another way": "differently",
    "of another kind": "of a different kind",
}


def found_in(text: str) -> list[tuple[int, str]]:
    """The line and the phrase of each place."""
    found = []
    for phrase in INSTEAD:
        words = rf"(?:{GAP}| )".join(map(re.escape, phrase.split()))
        before = r"\b" * phrase[0].isalpha() + r"(?<![Tt]here )" * (phrase == "is no")
        after = r"(?! (?:longer|more)\b)" * (phrase == "is no")
        for match in re.finditer(rf"{before}{words}\b{after}", text):
            found.append((text.count("\n", 0, match.start()) + 1, phrase))
    return found


@pytest.mark.parametrize("paths", [SOURCES, PAGES], ids=["sources", "pages"])
def test_english(paths: list[Path]) -> None:
    places = [
        f"{path.relative_to(ROOT)}:{line}: {phrase!r}; write {INSTEAD[phrase]}"
        for path in paths
        for line, phrase in found_in(path.read_text(encoding="utf-8"))
    ]
    assert places == [], "\n".join(places)


def test_the_check_can_fail() -> None:
    assert SOURCES and PAGES
    assert found_in("It `waits`, so\n# that, for ever, it is no use.") == [
        (1, ", so that"),
        (2, "for ever"),
        (2, "is no"),
    ]
    assert found_in("There is no such file, and it is no longer here.") == []
