"""Trainers of other libraries in a process of their own, under a meter that is not recollect's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forked_processes import HAS_METER, ForkedProcess
from metered_trainers import NUM_STEPS
from rank_processes import free_port, outputs_of

ROOT = Path(__file__).parents[2]
_PROGRAM = ROOT / "tests/support/metered_trainers.py"
Row = dict[str, Any]
# Of all cases of a module together; processes that wait for each other may do so for ever.
_LONGEST_S = 500

# The weights of a layer of `hugging_face_trainers.llama`, which FSDP2 gathers.
LAYER_BYTES = 164_352

needs_meter = pytest.mark.skipif(not HAS_METER, reason="the meter is built by a C compiler on Linux")


def metered(module: str, *names: str) -> dict[str, Row]:
    """Run the cases of a module; return a row for each (`metered_trainers.py`)."""
    return metered_ranks(module, *names, num_ranks=1)[0]


def metered_ranks(module: str, *names: str, num_ranks: int) -> list[dict[str, Row]]:
    """Run the cases of a module in several processes that train together; return the rows of each."""
    group = {"MASTER_PORT": str(free_port())}
    ranks = [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
        for rank in (range(num_ranks) if num_ranks > 1 else ())
    ]
    started = [ForkedProcess(_PROGRAM, module, *names, **group, **rank) for rank in ranks or [{}]]
    outputs = outputs_of(started, longest_s=_LONGEST_S)
    # Trainers write to the same stream.
    found = [[json.loads(line) for line in out.splitlines() if line.startswith('{"case"')] for out in outputs]
    return [{row["case"]: row for row in rows} for rows in found]


def check_row(row: Row, *, recorded_steps: int = 1, steps: int = NUM_STEPS, late_bytes: int = 0) -> None:
    """Every step is within the budget, and the training the same.

    Args:
        row: of a case.
        recorded_steps: of those of the training.
        steps: of the training.
        late_bytes: by which one step in ten may exceed the budget, as gloo's threads now and then release a moment late what
            they sent or received: up to one message.
    """
    assert row["weights_equal"], row
    assert row["warnings"] == [] and row["recorded_steps"] == recorded_steps, row
    assert len(row["peaks_bytes"]) == steps
    late = [peak for peak in row["peaks_bytes"] if peak > row["budget_bytes"]]
    assert len(late) <= (steps // 10 if late_bytes else 0), row
    assert max(row["peaks_bytes"]) <= row["budget_bytes"] + late_bytes < row["plain_bytes"], row
