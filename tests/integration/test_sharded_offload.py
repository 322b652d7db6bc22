"""Plans that offload values of a model that FSDP2 shards: its gathered parameters never go, what its units return may."""

from pathlib import Path

import pytest
import torch

from asked_cases import AskedCases
from rank_processes import rank_cases

PROGRAM = Path(__file__).parents[1] / "support/sharded_offload.py"
pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs PyTorch with the gloo backend")


cases = rank_cases(PROGRAM, 2)


@pytest.mark.parametrize("case", ["fp32", "bf16"])
def test_gradients_are_equal_and_parameters_stay(cases: AskedCases, case: str) -> None:
    for row in cases[case]:
        assert "error" not in row, row
        for found in (row["all"], *row["random"]):
            assert found["is_equal"] and found["values"] and not found["parameters"] and not found["left"], found
        for found in row["random"]:
            assert found["missed"] == 0 and found["ends"] == [found["host_bytes"]], found
        # What cannot be recomputed, as the parameters are freed, is copied back all the same.
        assert "drops the output of unit 'blocks.0', whose parameters FSDP2 frees" in row["refused"]
