"""Trainers in two processes over gloo, each within its budget in every step, with one plan; and mistakes, which both tell."""

from __future__ import annotations

import importlib.util
import re

import pytest

from metered_processes import LAYER_BYTES, Row, check_row, metered_ranks, needs_meter
from metered_trainers import FEW_STEPS, SHARDED_STEPS

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    needs_meter,
    *(
        pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"needs {name}")
        for name in ("accelerate", "trl", "peft", "lightning")
    ),
]

# Of `trainer_ranks.CASES`, and how many steps are recorded: Lightning frees gradients between forward and backward, so that
# they are alive when the second step begins.
CASES = {
    "Hugging Face DDP": 1,
    "Hugging Face FSDP2": 1,
    "SFT of LoRA DDP": 1,
    "Lightning DDP": 2,
    "Lightning FSDP2": 2,
}


@pytest.fixture(scope="module")
def processes() -> list[dict[str, Row]]:
    return metered_ranks("trainer_ranks", num_ranks=2)


@pytest.mark.parametrize("name", CASES)
def test_every_step_of_two_processes_is_within_the_budget(name: str, processes: list[dict[str, Row]]) -> None:
    for rows in processes:
        how = {"steps": SHARDED_STEPS, "late_bytes": LAYER_BYTES} if name.endswith("FSDP2") else {"steps": FEW_STEPS}
        check_row(rows[name], recorded_steps=CASES[name], **how)


@pytest.mark.parametrize("name", ["two budgets in Hugging Face", "two budgets in Lightning"])
def test_two_budgets_are_the_same_error_in_both(name: str, processes: list[dict[str, Row]]) -> None:
    first, second = (rows[name] for rows in processes)
    expected = r"ConfigError: got budget in rank 0='80%', budget in rank 1='90%': two values of budget in one group"
    assert re.match(expected, first["error"]), first
    assert first["error"] == second["error"]
    assert max(first["seconds"], second["seconds"]) < 30


def test_a_process_without_a_budget_is_named_within_seconds(processes: list[dict[str, Row]]) -> None:
    first, second = (rows["one without a budget"] for rows in processes)
    assert first["error"] == (
        "RecordError: MemoryBudget: rank 1 of 2 trains without it, expected it in every process of the training, since they "
        "run one plan. Pass it in all of them, or in none."
    )
    # Nothing of recollect runs there: it ends as PyTorch sees that the other has.
    assert "RuntimeError" in second["error"] or "DistBackendError" in second["error"]
    assert max(first["seconds"], second["seconds"]) < 30
