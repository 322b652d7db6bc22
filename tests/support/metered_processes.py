"""Trainers of other libraries in a process of their own, under a meter that is not recollect's."""

from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from asked_cases import AskedCases, Row, asked_cases
from forked_processes import HAS_METER, ForkedProcess
from metered_trainers import NUM_STEPS, SHARDED_STEPS
from rank_processes import free_port

ROOT = Path(__file__).parents[2]
_PROGRAM = ROOT / "tests/support/metered_trainers.py"

# The weights of a layer of `hugging_face_trainers.llama`, which FSDP2 gathers.
LAYER_BYTES = 164_352

needs_meter = pytest.mark.skipif(not HAS_METER, reason="the meter is built by a C compiler on Linux")


def metered(module: str, *, num_ranks: int = 1) -> AbstractContextManager[AskedCases]:
    """Ask for the cases of a module (`metered_trainers.py`), each in several processes that train together if so wanted."""
    group = {"MASTER_PORT": str(free_port())}
    ranks = [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
        for rank in (range(num_ranks) if num_ranks > 1 else ())
    ]
    return asked_cases([ForkedProcess(_PROGRAM, module, has_input=True, **group, **rank) for rank in ranks or [{}]])


def check_row(row: Row, *, recorded_steps: int = 1, is_sharded: bool = False) -> None:
    """Every step is within the budget, and the training the same.

    Args:
        row: of a case.
        recorded_steps: of those of the training.
        is_sharded: by FSDP2. One step in ten may then exceed the budget by a layer's weights, as gloo's threads now and then
            release a moment late what they sent or received.
    """
    assert row.get("weights_equal"), row
    assert row["warnings"] == [] and row["recorded_steps"] == recorded_steps, row
    late = [peak for peak in row["peaks_bytes"] if peak > row["budget_bytes"]]
    assert len(row["peaks_bytes"]) == (SHARDED_STEPS if is_sharded else NUM_STEPS)
    assert len(late) <= (SHARDED_STEPS // 10 if is_sharded else 0), row
    assert max(row["peaks_bytes"]) <= row["budget_bytes"] + is_sharded * LAYER_BYTES < row["plain_bytes"], row
