"""docs/zoo.md, made from the rows that `benchmarks/model_zoo.py` wrote."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["PAGE", "page", "read_rows"]

PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"
Row = Mapping[str, Any]

_HEAD = """# Architectures of transformers

<!-- not run: takes minutes -->
```sh
python benchmarks/model_zoo.py          # goes on where the last run ended
python benchmarks/model_zoo.py --engine graph   # instead, the graph engine
python benchmarks/model_zoo.py --page   # this page, from the rows there are
```

Each class that transformers lists for a task, unmodified, with random weights and a configuration shrunk by the names of
its fields (width 64, three layers, four heads). Its step is recorded, planned for a budget at 60 % of the way from the
least peak to the peak without recompute, and run as most loops run it, twice: `out = model(**batch); out.loss.backward()`,
with `out` alive until the next one is there, and the gradients until the next backward. Then the same with full recompute.

Classes that take images or sound with text train on both: each sequence has an image, or a sound, and a word for each of its
features. Where processors lay images out in several ways, the batch is the first of them that the class takes.

- **exact**: loss, every gradient, every buffer and the state of the random generator have the same bits as without a
  plan, under both; and the measured peak is within the budget. Peaks are counted by a meter that shares nothing with
  recollect's.
- **inexact**: a bit differs. **over budget**: the measured peak is above the budget. **crashed**: an exception. **too
  slow**: more than 20 s of processor time for recording, planning and all steps together.
- **not built**: the shrunk configuration, or the batch made from the arguments of `forward`, does not suit the class,
  which then says nothing about recollect. **not repeatable**: two steps without a plan differ.
"""
_TRIED_FROM_TRACES = ("traced", "on the tape", "different", "crashed", "too slow")
_TRIED = ("exact", "inexact", "over budget", "crashed", "too slow")


def read_rows(path: Path) -> dict[str, Row]:
    """Return the last row of each class."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["class_name"]: row for row in rows}


def page(rows: Mapping[str, Row], traced_rows: Mapping[str, Row] | None = None) -> str:
    """Return the page, from rows of the tape and rows of the graph engine."""
    by_task: dict[str, list[Row]] = {}
    for row in rows.values():
        by_task.setdefault(row["task"], []).append(row)
    parts = [_HEAD, _facts(rows.values()), _summary(by_task)]
    if traced_rows:
        parts.append(_from_traces(list(traced_rows.values())))
    parts += [_section(task, sorted(found, key=lambda row: row["class_name"])) for task, found in by_task.items()]
    return "\n".join(parts)


def _facts(rows: Iterable[Row]) -> str:
    rows = list(rows)
    if not rows:
        return "Nothing has been run yet.\n"
    tried = [row for row in rows if row["verdict"] in _TRIED]
    count = Counter(row["verdict"] for row in rows)
    off = sorted(row["measured_bytes"] - row["predicted_bytes"] for row in tried if row["measured_bytes"])
    days = sorted({row["date"][:10] for row in rows})
    exact = f"{count['exact']} of {len(tried)} classes are exact and within the budget"
    facts = [f"Run on {days[0]}" + (f" to {days[-1]}" if days[-1] != days[0] else "") + f": {exact}"]
    facts.append(f" ({count['exact'] / len(tried):.1%})" if tried else "")
    facts.append(f"; {count['not built']} could not be built, {count['not repeatable']} are not repeatable.")
    if off:
        facts.append(f" Measured minus predicted peak: {off[0]:,} to {off[-1]:,} bytes, median {off[len(off) // 2]:,}.")
    return "".join(facts) + "\n"


def _summary(by_task: Mapping[str, list[Row]]) -> str:
    verdicts = [*_TRIED, "not built", "not repeatable"]
    lines = ["| task | " + " | ".join(verdicts) + " |", "|---|" + "--:|" * len(verdicts)]
    for task, rows in by_task.items():
        count = Counter(row["verdict"] for row in rows)
        lines.append(f"| {task} | " + " | ".join(str(count[verdict]) for verdict in verdicts) + " |")
    return "\n".join(lines) + "\n"


def _from_traces(rows: Sequence[Row]) -> str:
    """Return what runs on the graph engine, and why not all does."""
    tried = [row for row in rows if row["verdict"] in _TRIED_FROM_TRACES]
    count = Counter(row["verdict"] for row in rows)
    kinds = [traced == number for row in tried for number, traced in row["kinds"].values()]
    with_traces = [row for row in tried if row["traces"]]
    seconds = sorted(row["trace_s"] / row["traces"] for row in with_traces)
    own = sum(row["own_s"] for row in with_traces) / (sum(row["trace_s"] for row in with_traces) or 1)
    lines = [
        "## From traces",
        "",
        "`--engine graph` trains each class for three steps without a plan, and from traces with each layer at its leanest,",
        "and compares every loss, gradient, buffer and the state of the random generator.",
        "",
        f"Of {len(tried)} classes, {count['traced']} run all their layers from traces "
        f"({count['traced'] / len(tried):.1%}), with the same bits; {count['on the tape']} run some layers on the tape, "
        f"with the same bits; {count['different']} differ, {count['crashed']} crash, {count['too slow']} take more than a "
        f"minute. Of {len(kinds)} classes of layers, {sum(kinds)} are traced. A trace takes "
        f"{seconds[len(seconds) // 2]:.2f} s of processor time in the median, {seconds[-1]:.1f} s at most; {1 - own:.0%} of "
        "it is Dynamo's.",
        "",
        "| class | layers from traces | why not all |",
        "|---|--:|---|",
    ]
    for row in sorted(tried, key=lambda row: row["class_name"]):
        if row["verdict"] != "traced":
            number, traced = (sum(of[place] for of in row["kinds"].values()) for place in (0, 1))
            verdict = "" if row["verdict"] == "on the tape" else row["verdict"] + ": "
            lines.append(f"| {row['class_name']} | {traced} of {number} | {verdict}{_plain(row['reason'])} |")
    return "\n".join(lines) + "\n"


def _section(task: str, rows: list[Row]) -> str:
    """Return the table of a task; classes that were not built are listed below it."""
    lines = [
        f"## {task}",
        "",
        "| class | verdict | plain, KiB | budget | predicted | measured | seconds |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        if row["verdict"] in _TRIED:
            sizes = [_kib(row[key]) for key in ("plain_bytes", "budget_bytes", "predicted_bytes", "measured_bytes")]
            verdict = row["verdict"] + (f": {_plain(row['reason'])}" if row["reason"] else "")
            lines.append(f"| {row['class_name']} | {verdict} | " + " | ".join(sizes) + f" | {row['seconds']:.1f} |")
    left = [row for row in rows if row["verdict"] not in _TRIED]
    if left:
        names = ", ".join(row["class_name"] for row in left)
        lines += ["", f"Not checked: {names}."]
    return "\n".join(lines) + "\n"


def _kib(num_bytes: int) -> str:
    return f"{num_bytes / 1024:,.1f}" if num_bytes else ""


def _plain(text: str) -> str:
    return text.replace("|", "/").replace("<", "(").replace(">", ")").replace("`", "'")
