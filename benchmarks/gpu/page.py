"""docs/gpu.md, made from the rows that `scripts/gpu` wrote: `scripts/gpu --page`."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from gpu.measured import Measured
from gpu.page_tables import TABLES
from subject import StepFlags

__all__ = ["page", "read", "write_page"]

_ROOT = Path(__file__).parents[2]
PAGE = _ROOT / "docs" / "gpu.md"

_HEAD = """# Measured on GPUs

<!-- not run: needs a GPU -->
```sh
scripts/gpu --out benchmarks/results/gpu   # where there is a CUDA device; each part takes less than eight minutes
scripts/gpu --page                         # this page, from the rows there
```

`scripts/gpu --help` lists the parts, and `scripts/gpu --dry-run` runs them all at tiny sizes on a CPU. Needed are a checkout,
torch 2.11 or later, transformers, NumPy, SciPy, PyYAML, Rich, matplotlib and pytest; no network.
"""
_NOTHING = """
Nothing has been measured on a GPU yet: recollect has not run on CUDA so far. All numbers in its documentation are from CPUs, or
modelled and marked so.
"""


def read(path: Path, parts: tuple[str, ...]) -> Measured | None:
    """Read the rows of a part from a file named <device>-<yyyymm>-<part>.csv; None where it has none, or is no such file."""
    part = next((name for name in parts if path.stem.endswith(f"-{name}")), None)
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    if part is None or not rows:
        return None
    last = rows[-1]
    config = json.loads(last["config"])
    found = Measured(
        part=part,
        machine=last["machine"],
        torch=last["torch"],
        commit=last["commit"],
        date=last["date"],
        versions=config.get("versions", {}),
        command=config.get("command", ""),
        sizes=_sizes(config) if "num_layers" in config and "dtype" in config else "",
    )
    for row in rows:
        found.values.setdefault(row["metric"], {})[row["contestant"]] = row["value"]
    return found


def _sizes(config: dict[str, Any]) -> str:
    sizes = {field.name: config[field.name] for field in fields(StepFlags) if field.name in config}
    return f"Step: {StepFlags(**sizes)}"


def page(folder: Path) -> str:
    """Return the page for the files of a folder."""
    found = [read(path, tuple(TABLES)) for path in sorted(folder.glob("*.csv"))]
    sections = [_section(one, TABLES[one.part]) for one in found if one is not None]
    return _HEAD + ("\n".join(["", *sections]) if sections else _NOTHING)


def _section(found: Measured, table: Callable[[Measured], str]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    facts = f"{found.machine}; {versions}; commit {found.commit}, {found.date[:10]}; `{found.command}`."
    facts += f" {found.sizes}." if found.sizes and found.part.startswith(("frontier", "compiled", "engines")) else ""
    return f"## {found.part}, {found.machine}\n\n{facts}\n\n{table(found)}\n"


def write_page(folder: Path) -> int:
    """Write docs/gpu.md; return the exit status."""
    PAGE.write_text(page(folder), encoding="utf-8")
    print(f"written: {PAGE.relative_to(_ROOT)}")
    return 0
