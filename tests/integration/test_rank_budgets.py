"""Two processes over gloo, each within its budget in every step, with one plan: Accelerate's DDP and FSDP2, and ZeRO-1."""

import importlib.util

import pytest

from asked_cases import AskedCases
from metered_processes import LAYER_BYTES, check_row, metered_cases, needs_meter
from metered_trainers import NUM_STEPS, SHARDED_STEPS
from tiers import long_but

pytestmark = [
    needs_meter,
    pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate"),
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers"),
]

# Of those in `accelerate_ranks.CASES`.
NAMES = ("DDP", "FSDP2", "ZeRO-1, bucket views")


# In each a process asserts that the other one runs the same plan.
cases = metered_cases("accelerate_ranks", num_ranks=2)


@pytest.mark.parametrize("name", long_but(("FSDP2",), NAMES))
def test_every_step_of_two_processes_is_within_the_budget(name: str, cases: AskedCases) -> None:
    for row in cases[name]:
        how = {"steps": SHARDED_STEPS, "late_bytes": LAYER_BYTES} if name == "FSDP2" else {"steps": NUM_STEPS}
        check_row(row, **how)
