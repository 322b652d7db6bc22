"""Runs the tests with other versions, and makes the table of CONTRIBUTING.md: scripts/versions [ROW...], or --page.

Each row is a call of `scripts/test` in an environment of its own; what it found is a line of docs/versions.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from pages.figures import ROOT

__all__ = ["ROWS", "table"]

_RESULTS = ROOT / "docs" / "versions.jsonl"
_PAGE = ROOT / "CONTRIBUTING.md"


@dataclass(frozen=True)
class Row:
    """A set of versions.

    Attributes:
        name: what is other than usual in it.
        options: of `scripts/test`.
        python: that its environment is made of; empty for the usual one.
        is_whole: whether all tests run, and not only those in tests/core.txt.
    """

    name: str
    options: tuple[str, ...]
    python: str = ""
    is_whole: bool = False


ROWS = (
    *(Row(f"torch {v}", ("--torch", v), is_whole=True) for v in ("2.11.0", "2.13.0", "2.14.1", "2.15.0")),
    Row("Python 3.10", ("--torch", "2.14.1"), python="python3.10"),  # the last PyTorch for it
    Row("Python 3.13", ("--torch", "2.15.0"), python="python3.13"),
    Row("transformers 4.50.0", ("--torch", "2.13.0", "--with", "transformers==4.50.0")),
    Row("numpy 1.26.0", ("--torch", "2.13.0", "--with", "numpy==1.26.0")),
)


def run(row: Row, is_whole: bool) -> dict[str, Any]:
    """Run the tests of a row, all or the core; return its line."""
    environment = {**os.environ, **({"PYTHON": row.python} if row.python else {})}
    # What trainers need does not install with every version; their tests skip then, and say so.
    environment |= {} if row.is_whole else {"RECOLLECT_EXTRA": "test"}
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.xml"
        options = [*row.options, "--all" if is_whole else "--core"]
        begin = time.monotonic()
        subprocess.run(["scripts/test", *options, "-q", f"--junitxml={found}"], cwd=ROOT, env=environment, check=False)
        if not found.exists():
            raise SystemExit(f"scripts/versions: {row.name}: scripts/test wrote no results; see above.")
        tests = "all" if is_whole else "core"
        return {"row": row.name, "tests": tests, **_counts(found), "minutes": round((time.monotonic() - begin) / 60, 1)}


def _counts(found: Path) -> dict[str, Any]:
    """Return how many tests passed, failed and were skipped, and the versions that they found."""
    counts: Counter[str] = Counter()
    suite = ElementTree.parse(found).getroot()
    for case in suite.iter("testcase"):
        kinds = {child.tag for child in case}
        counts["failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"] += 1
    properties = {p.get("name", ""): p.get("value") for p in suite.iter("property")}
    versions = {name.partition(":")[2]: value for name, value in properties.items() if name.startswith("version:")}
    return {"versions": versions, **{kind: counts[kind] for kind in ("passed", "failed", "skipped")}}


def table() -> str:
    """Return the table of what was found."""
    known = {line["row"]: line for line in map(json.loads, _RESULTS.read_text(encoding="utf-8").splitlines())}
    lines = [
        "| tests | Python | torch | transformers | numpy | passed | failed | skipped |",
        "|---|---|---|---|---|--:|--:|--:|",
    ]
    for row in ROWS:
        if row.name in known:
            line = known[row.name]
            versions = [line["versions"].get(name, "") for name in ("Python", "torch", "transformers", "numpy")]
            counts = [f"{line[kind]:,}" for kind in ("passed", "failed", "skipped")]
            lines.append(f"| {' | '.join([line['tests'], *versions, *counts])} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the rows that are named, or all of them, and renew the table."""
    names = [row.name for row in ROWS]
    parser = argparse.ArgumentParser(prog="scripts/versions", description="Run the tests with other versions.")
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"default: all of {', '.join(map(repr, names))}")
    parser.add_argument("--core", action="store_true", help="run only the files in tests/core.txt, in every row")
    parser.add_argument("--page", action="store_true", help="only print the table")
    given = parser.parse_args()
    unknown = [name for name in given.rows if name not in names]
    if unknown:
        parser.error(f"no row {unknown[0]!r}; the rows are {', '.join(map(repr, names))}")
    if not given.page:
        known = _RESULTS.read_text(encoding="utf-8").splitlines() if _RESULTS.exists() else []
        lines = {json.loads(line)["row"]: line for line in known}
        before = table() if known else ""
        for row in ROWS:
            if row.name in (given.rows or names):
                lines[row.name] = json.dumps(run(row, row.is_whole and not given.core))
                _RESULTS.write_text("".join(f"{line}\n" for line in lines.values()), encoding="utf-8")
        page = _PAGE.read_text(encoding="utf-8")
        if before and before in page:
            _PAGE.write_text(page.replace(before, table()), encoding="utf-8")
    sys.stdout.write(table())


if __name__ == "__main__":
    main()
