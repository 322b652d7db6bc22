"""Trainers in two processes over gloo, each within its budget in every step, with one plan; and mistakes, which both tell."""

import importlib.util
import re

import pytest

from asked_cases import AskedCases
from metered_processes import LAYER_BYTES, ROOT, check_row, metered_cases, needs_meter
from metered_trainers import NUM_STEPS, SHARDED_STEPS
from rank_processes import run_ranks
from tiers import long

pytestmark = [
    needs_meter,
    *(
        pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"needs {name}")
        for name in ("accelerate", "trl", "peft", "lightning")
    ),
]

# Of `trainer_ranks.CASES`.
CASES = ["Hugging Face DDP", "Hugging Face FSDP2", "SFT of LoRA DDP", "Lightning DDP", "Lightning FSDP2"]


cases = metered_cases("trainer_ranks", num_ranks=2)


@pytest.mark.parametrize("name", long(CASES))
def test_every_step_of_two_processes_is_within_the_budget(name: str, cases: AskedCases) -> None:
    for row in cases[name]:
        how = {"steps": SHARDED_STEPS, "late_bytes": LAYER_BYTES} if name.endswith("FSDP2") else {"steps": NUM_STEPS}
        check_row(row, **how)


@pytest.mark.parametrize("name", ["two budgets in Hugging Face", "two budgets in Lightning"])
def test_two_budgets_are_the_same_error_in_both(name: str, cases: AskedCases) -> None:
    first, second = cases[name]
    expected = r"ConfigError: got budget in rank 0='80%', budget in rank 1='90%': two values of budget in one group"
    assert re.match(expected, first["error"]), first
    assert first["error"] == second["error"]


@pytest.mark.long  # A minute: a layer is compiled in three ways.
def test_compiled_layers_stay_so_in_two_processes() -> None:
    run_ranks(2, ROOT / "tests/support/compiled_trainer_ranks.py")


def test_a_process_without_a_budget_is_named(cases: AskedCases) -> None:
    first, second = cases.last("one without a budget")
    assert first["error"] == (
        "RecordError: MemoryBudget: rank 1 of 2 trains without it, expected it in every process of the training, since they "
        "run one plan. Pass it in all of them, or in none."
    )
    # Nothing of recollect runs there: it ends as PyTorch sees that the other has.
    assert "RuntimeError" in second["error"] or "DistBackendError" in second["error"]
