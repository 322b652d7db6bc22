"""Trainers of other libraries in a process of their own, under a meter that is not recollect's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from allocator_meter import can_be_built, metered_environment  # noqa: E402

Row = dict[str, Any]

needs_meter = pytest.mark.skipif(not can_be_built(), reason="the meter is built by a C compiler on Linux")


def metered(module: str, *names: str) -> dict[str, Row]:
    """Run the cases of a module; return a row for each (`metered_trainers.py`)."""
    with metered_environment() as environment:
        paths = [ROOT / "benchmarks", ROOT / "tests/support", environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = ":".join(map(str, paths))
        command = [sys.executable, "-W", "ignore", str(ROOT / "tests/support/metered_trainers.py"), module, *names]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # Trainers write to the same stream.
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    return {row["case"]: row for row in rows}


def check_row(row: Row) -> None:
    """Every step is within the budget, and the training the same."""
    assert row["weights_equal"], row
    assert row["warnings"] == [] and row["recorded_steps"] == 1, row
    assert len(row["peaks_bytes"]) == 30
    assert max(row["peaks_bytes"]) <= row["budget_bytes"] < row["plain_bytes"], row
