"""What runs of tests said of faults: a file of JSON lines, and the table of them."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mutations.mutation import Mutation

__all__ = ["Results", "table"]

Line = dict[str, Any]


class Results:
    """The lines of a file that say what was found in one tree.

    Several processes may append to the file; lines of other trees stay in it.
    """

    def __init__(self, path: Path, tree: str) -> None:
        self._path = path
        self._tree = tree
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)

    def _lines(self, kind: str) -> list[Line]:
        text = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
        lines: list[Line] = [json.loads(line) for line in text.splitlines()]
        return [line for line in lines if line["tree"] == self._tree and kind in line]

    def _add(self, line: Line) -> None:
        with self._lock, self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"tree": self._tree, **line}) + "\n")

    def found(self, mutation: Mutation, stages: Sequence[str]) -> Line | None:
        """Return what is known of a fault, if these stages would say no more."""
        for line in reversed(self._lines("mutation")):
            is_enough = line["caught"] in stages or (line["caught"] is None and set(stages) <= set(line["ran"]))
            if line["mutation"] == mutation.name and line["edits"] == _form(mutation) and is_enough:
                return line
        return None

    def add(self, mutation: Mutation, line: Line) -> Line:
        """Note what was found of a fault."""
        line = {"mutation": mutation.name, "edits": _form(mutation), **line}
        self._add(line)
        return line

    def without_fault(self) -> dict[str, bool]:
        """Return of tests that have failed whether they pass without any fault."""
        return {line["test"]: line["passes"] for line in self._lines("test")}

    def add_without_fault(self, test: str, passes: bool) -> None:
        """Note whether a test passes without any fault."""
        self._add({"test": test, "passes": passes})


def _form(mutation: Mutation) -> list[list[str]]:
    return [list(edit) for edit in mutation.edits]


def table(mutations: Sequence[Mutation], lines: Sequence[Line], stages: Sequence[str]) -> str:
    """Return how many faults of each area were caught where, and what escaped."""
    columns = [*stages, "not caught"]
    areas = sorted({mutation.area for mutation in mutations})
    caught = {line["mutation"]: line["caught"] or "not caught" for line in lines}
    rows = [(area, [mutation for mutation in mutations if mutation.area == area]) for area in areas]
    rows = [*rows, ("all", list(mutations))]
    text = f"| area | faults | {' | '.join(columns)} |\n|---|--:|{'--:|' * len(columns)}\n"
    for area, some in rows:
        counts = [sum(caught.get(mutation.name) == column for mutation in some) for column in columns]
        text += f"| {area} | {len(some)} | {' | '.join(map(str, counts))} |\n"
    missed = [mutation for mutation in mutations if caught.get(mutation.name) == "not caught"]
    if missed:
        text += "\nnot caught:\n" + "".join(f"    {mutation.name}: {mutation.breaks}\n" for mutation in missed)
    single = [line for line in lines if line["caught"] and len(line["tests"]) == 1]
    if single:
        text += "\ncaught by one test only:\n" + "".join(
            f"    {one['mutation']}: {one['tests'][0]}\n" for one in single
        )
    return text
