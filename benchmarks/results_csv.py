"""Read and append the files under `results/`: one row per number, never edited."""

from __future__ import annotations

import csv
import datetime
import json
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from recollect.lab.bench.race import processor_name

COLUMNS = ("metric", "unit", "contestant", "value", "config", "machine", "torch", "date", "commit")


class Number(NamedTuple):
    """One result: metric, unit, contestant and value."""

    metric: str
    unit: str
    contestant: str
    value: float | int | str


def machine_name(device: str) -> str:
    """Name the device of the step."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(torch.device(device))
    return processor_name()


def append(path: Path, numbers: Iterable[Number], config: Mapping[str, Any]) -> None:
    """Append rows to a file, created with a header if missing.

    Raises:
        ValueError: the file is there and has other columns.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    if not is_new:
        with path.open(encoding="utf-8", newline="") as file:
            header = tuple(next(csv.reader(file), ()))
        if header != COLUMNS:
            raise ValueError(f"{path}: got the columns {header}, expected {COLUMNS}. Move the file out of the way.")
    context = (
        json.dumps(config, sort_keys=True),
        machine_name(config["device"]),
        torch.__version__,
        datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        commit(),
    )
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(COLUMNS)
        writer.writerows((*number, *context) for number in numbers)


@dataclass(frozen=True)
class RowsFile:
    """A file of rows, and the columns shared by all rows of one run."""

    path: Path
    config: Mapping[str, Any]

    def append(self, numbers: Iterable[Number]) -> None:
        """Append rows."""
        append(self.path, numbers, self.config)


class Source(NamedTuple):
    """The origin of rows."""

    machine: str
    torch: str


def read_last(path: Path, config: Mapping[str, Any], metric: str) -> tuple[list[Number], Source | None]:
    """Return the rows of the last run that has a metric, and their origin.

    Args:
        path: a file that `append` wrote.
        config: as `append` got it; rows with another one do not count.
        metric: which of the things that are measured.

    Returns:
        Nothing and None where there are none.
    """
    wanted = json.dumps(config, sort_keys=True)
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["config"] == wanted]
    last = next((row for row in reversed(rows) if row["metric"] == metric), None)
    if last is None:
        return [], None
    together = [row for row in rows if row["date"] == last["date"]]
    numbers = [Number(row["metric"], row["unit"], row["contestant"], row["value"]) for row in together]
    return numbers, Source(last["machine"], last["torch"])


def commit() -> str:
    """Return the current commit, marked if tracked files of the library or the benchmarks differ from it."""

    def git(*arguments: str) -> str:
        here = Path(__file__).parent
        done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        name = git("rev-parse", "--short=10", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "../src", "*.py")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name}-changed" if changed else name
