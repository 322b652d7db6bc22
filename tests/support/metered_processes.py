"""Trainers of other libraries in a process of their own, under a meter that is not recollect's."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from allocator_meter import can_be_built, metered_environment  # noqa: E402

Row = dict[str, Any]
# Of all cases of a module together; processes that wait for each other may do so for ever.
_LONGEST_S = 540

needs_meter = pytest.mark.skipif(not can_be_built(), reason="the meter is built by a C compiler on Linux")


def metered(module: str, *names: str) -> dict[str, Row]:
    """Run the cases of a module; return a row for each (`metered_trainers.py`)."""
    return metered_ranks(module, *names, num_ranks=1)[0]


def metered_ranks(module: str, *names: str, num_ranks: int) -> list[dict[str, Row]]:
    """Run the cases of a module in several processes that train together; return the rows of each."""
    with metered_environment() as environment:
        paths = [ROOT / "benchmarks", ROOT / "tests/support", environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = ":".join(map(str, paths))
        environment["MASTER_PORT"] = str(free_port())
        command = [sys.executable, "-W", "ignore", str(ROOT / "tests/support/metered_trainers.py"), module, *names]
        started = [
            subprocess.Popen(
                command,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
                if num_ranks > 1
                else environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(num_ranks)
        ]
        try:
            done = [process.communicate(timeout=_LONGEST_S) for process in started]
        finally:
            for process in started:
                process.kill()
    assert all(process.returncode == 0 for process in started), "".join(stderr[-4000:] for _, stderr in done)
    # Trainers write to the same stream.
    found = [[json.loads(line) for line in out.splitlines() if line.startswith('{"case"')] for out, _ in done]
    return [{row["case"]: row for row in rows} for rows in found]


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def check_row(row: Row, *, recorded_steps: int = 1, steps: int = 30) -> None:
    """Every step is within the budget, and the training the same."""
    assert row["weights_equal"], row
    assert row["warnings"] == [] and row["recorded_steps"] == recorded_steps, row
    assert len(row["peaks_bytes"]) == steps
    assert max(row["peaks_bytes"]) <= row["budget_bytes"] < row["plain_bytes"], row
