"""Models that FSDP2 shards: pipelines of them hold their budgets on every rank, and what offloads them leaves parameters."""

from pathlib import Path

import pytest
import torch
from torch import nn

import recollect
from asked_cases import AskedCases
from rank_processes import rank_cases
from recollect.errors import ArgumentError
from tiers import long_but

STAGES = Path(__file__).parents[1] / "support/sharded_stages.py"
pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs PyTorch with the gloo backend")


cases = rank_cases(STAGES, 4)


# What predictions add, and scalars such as losses.
ROOM = 2048
# An interleaved rank holds what it sent; how much of that meets its fullest moment is an upper bound, here by four tensors.
SENT = 4 * 4 * 4 * 32 * 32
# Parameters of a stage that are freed after each forward count as whole throughout.
WHOLE = 4 * 4 * 12_704
MOST_ABOVE = {
    "1F1B": ROOM,
    "bf16": ROOM,
    "interleaved": ROOM + SENT,
    "frees": ROOM + WHOLE,
    "little": ROOM,
    "uneven": ROOM,
}
# Where the fullest moment is that in which gradients are reduced.
REDUCING = ("little", "uneven")


@pytest.mark.parametrize("case", long_but(("bf16",), MOST_ABOVE))
def test_peaks_are_as_predicted_and_the_budget_holds(cases: AskedCases, case: str) -> None:
    rows = cases[case]
    for row in rows:
        assert row.get("is_equal"), row
        for which in ("plain", "planned"):
            predicted, measured = row[which]
            if case in REDUCING:
                # A thread of gloo may let go of the gradients of one group a moment late.
                measured = [min(measured)]
            assert max(measured) <= predicted <= min(measured) + MOST_ABOVE[case], (which, row)
    if case not in REDUCING:
        fullest = max(max(row["planned"][1]) for row in rows)
        assert fullest <= rows[0]["budget"]
        assert fullest < 0.75 * max(max(row["plain"][1]) for row in rows) and rows[0]["slowdown"] > 0


def test_a_stage_that_is_not_sharded_is_left_alone() -> None:
    stage = nn.Linear(2, 2)
    with recollect.gathered_stage(stage):
        stage(torch.ones(2)).sum().backward()
    assert stage.weight.grad is not None


def test_what_is_no_stage_is_refused() -> None:
    with (
        pytest.raises(
            ArgumentError, match=r"recollect\.gathered_stage\(stage\): got the text 'x' as stage, expected one of"
        ),
        recollect.gathered_stage("x"),  # type: ignore[arg-type]
    ):
        pass


OFFLOAD = Path(__file__).parents[1] / "support/sharded_offload.py"


offloaded = rank_cases(OFFLOAD, 2)


@pytest.mark.parametrize("case", ["fp32", "bf16"])
def test_gradients_are_equal_and_parameters_stay(offloaded: AskedCases, case: str) -> None:
    for row in offloaded[case]:
        assert "error" not in row, row
        for found in (row["all"], *row["random"]):
            assert found["is_equal"] and found["values"] and not found["parameters"] and not found["left"], found
        for found in row["random"]:
            assert found["missed"] == 0 and found["ends"] == [found["host_bytes"]], found
        # What cannot be recomputed, as the parameters are freed, is copied back all the same.
        assert "drops the output of unit 'blocks.0', whose parameters FSDP frees" in row["refused"]
