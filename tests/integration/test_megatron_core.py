"""`attach` takes what Megatron's `get_model` and `get_megatron_optimizer` return: the real ones, in two processes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch.distributed as dist

from rank_processes import run_ranks

PROGRAM = Path(__file__).parents[1] / "support/megatron_ranks.py"
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo"
    ),
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core"),
]


@pytest.mark.parametrize("layout", ["TP", "DP", "DP, distributed optimizer", "DP, distributed optimizer, bf16"])
def test_weights_are_those_without_a_budget_under_one_plan(layout: str) -> None:
    run_ranks(2, PROGRAM, layout)
