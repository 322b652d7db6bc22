"""Relative links in Markdown files lead to files, and their anchors to headings."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted(
    [*ROOT.glob("*.md"), *(path for top in ("benchmarks", "docs", "examples") for path in ROOT.glob(f"{top}/**/*.md"))]
)
LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#{1,6} +(.+?) *#*$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path: Path) -> list[str]:
    """Relative links of a Markdown file that lead nowhere."""
    broken = []
    for link in LINK.findall(CODE.sub("", path.read_text(encoding="utf-8"))):
        if re.match(r"[a-z][a-z+.-]*:", link):
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if not target.exists():
            broken.append(link)
        elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text(encoding="utf-8")):
            broken.append(link)
    return broken


def test_links_resolve() -> None:
    found = {str(path.relative_to(ROOT)): broken_links(path) for path in FILES}
    assert {name: links for name, links in found.items() if links} == {}


def test_the_check_can_fail(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b`: c\n[1](page.md) [2](page.md#a-b-c) [3](#no) ![4](no.png) [5](https://no.example) `[6](no)`\n"
        "```\n[7](no)\n```\n[8](no.md#a 'title') [9](no/x.md)\n",
        encoding="utf-8",
    )
    assert broken_links(page) == ["#no", "no.png", "no/x.md"]
