"""Plans that hold values as parts by themselves, under tensor parallelism: what they choose, and that it is exact."""

from pathlib import Path

import pytest
import torch

from asked_cases import AskedCases, Row
from rank_processes import rank_cases
from shard_programs import LAYERS, RANKS

PROGRAM = Path(__file__).parents[1] / "support" / "shard_programs.py"
pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs PyTorch with the gloo backend")


cases = rank_cases(PROGRAM, RANKS)


@pytest.fixture
def ranks(cases: AskedCases) -> list[Row]:
    return cases["over gloo"]


@pytest.fixture
def alone(ranks: list[Row], cases: AskedCases) -> Row:
    """And then without it, in the first rank."""
    assert ranks
    return cases["alone"][0]


@pytest.mark.long
def test_values_between_the_matrices_are_known_to_be_the_same(ranks: list[Row]) -> None:
    """What attention and the MLP compute differs; one value throughout, such as no dropout, would tell nothing."""
    found = ranks[0]["parts"]["decoder.layers.1"]
    assert {"add", "add#1", "input_layernorm.mul", "pre_mlp_layernorm.mul#1"} <= set(found)
    others = set(ranks[0]["values"]["decoder.layers.1"]) - set(found)
    assert {"self_attention.linear_qkv.mm", "self_attention.linear_proj.mm", "mlp.linear_fc1.mm"} <= others
    assert ranks[0]["parts"] == ranks[1]["parts"]
    assert all(found["json"] for found in ranks)


def test_gradients_are_those_without_a_plan(ranks: list[Row]) -> None:
    for row, other in zip(ranks[0]["rows"], ranks[1]["rows"], strict=True):
        for name in row.keys() - {"budget"}:
            assert row[name]["equal"] and other[name]["equal"]


def test_parts_lower_the_least_budget_and_the_slowdown(ranks: list[Row]) -> None:
    """In nearly all layers, at the least budget."""
    found = ranks[0]
    assert found["least"]["with"] < 0.97 * found["least"]["without"]
    leanest, tight = found["rows"]
    assert leanest["with"]["parts"] >= LAYERS - 1
    assert tight["with"]["parts"] > 0 == tight["without"]["parts"]
    assert tight["with"]["bound"] <= tight["with"]["slowdown"] * (1 + 1e-6)
    assert tight["with"]["slowdown"] < 0.9 * tight["without"]["slowdown"]
    assert tight["with"]["peak"] <= tight["budget"]


def test_peaks_are_predicted_to_the_byte(alone: Row) -> None:
    assert alone["parts"] > 0
    assert 0 <= alone["peak"] - alone["measured"] <= 1024


def test_fake_tensors_tell_what_ranks_compute_of_the_same_and_gathers_take_time(ranks: list[Row], alone: Row) -> None:
    path = "decoder.layers.1"
    assert alone["ranks"] == RANKS
    assert {"add", "add#1", "input_layernorm.mul"} <= set(alone["fake_parts"][path]) <= set(ranks[0]["parts"][path])
    assert min(alone["gather_s"]) > 0
