"""Two processes over gloo, each within its budget in every step, with one plan: Accelerate's DDP and FSDP2, and ZeRO-1."""

from __future__ import annotations

import importlib.util

import pytest

from metered_processes import LAYER_BYTES, Row, check_row, metered_ranks, needs_meter
from metered_trainers import FEW_STEPS, NUM_STEPS, SHARDED_STEPS

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    needs_meter,
    pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate"),
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers"),
]

# Of those in `accelerate_ranks.CASES`.
NAMES = ("DDP", "FSDP2", "ZeRO-1, bucket views")


@pytest.fixture(scope="module")
def processes() -> list[dict[str, Row]]:
    """The rows of each process; in its cases a process asserts that the other one runs the same plan."""
    return metered_ranks("accelerate_ranks", *NAMES, num_ranks=2)


@pytest.mark.parametrize("name", NAMES)
def test_every_step_of_two_processes_is_within_the_budget(name: str, processes: list[dict[str, Row]]) -> None:
    for rows in processes:
        steps = {"DDP": NUM_STEPS, "FSDP2": SHARDED_STEPS}.get(name, FEW_STEPS)
        check_row(rows[name], steps=steps, late_bytes=LAYER_BYTES if name == "FSDP2" else 0)
