"""The reference models in each layout, over gloo in two processes: gradients, plans, and what fake tensors say of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel_programs import ALONE, RANKS, WAYS

SUPPORT = Path(__file__).parents[1] / "support"
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs PyTorch with the gloo backend"),
]

# Split products and sums add in another order: a few units in the last place of fp32, which is 1.2e-7.
FARTHEST = 2e-6
# What every prediction from real tensors adds, and none from fake ones.
UNSEEN_BYTES = 1024
# gloo's threads let go of what they sent a moment late: here at most the embedding that FSDP2 has gathered, and a norm.
BUFFER_BYTES = 2 * 64 * 32 * 4 + 128


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(SUPPORT / "parallel_programs.py")]
    running = [subprocess.Popen([*command, str(rank), str(folder)], stderr=subprocess.PIPE) for rank in range(RANKS)]
    for process in running:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors.decode()
    return [torch.load(folder / f"rank{rank}", weights_only=False) for rank in range(RANKS)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", ["llama", "gpt"])
def test_gradients_are_those_of_the_whole_model(ranks: list[dict[str, Any]], model: str, way: str) -> None:
    assert max(found[f"farthest {model} {way}"] for found in ranks) <= FARTHEST


@pytest.mark.parametrize("way", WAYS)
def test_plans_change_no_bit(ranks: list[dict[str, Any]], way: str) -> None:
    """With dropout on, full recompute and a plan for half of what it saves."""
    assert [found[f"equal {plan} {way}"] for found in ranks for plan in ("full", "budget")] == [True] * 2 * RANKS


def test_the_loss_has_the_same_bits_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["loss sequence"] == ranks[1]["loss sequence"]


@pytest.mark.parametrize("way", WAYS)
def test_fake_tensors_tell_the_bytes_of_gloo(ranks: list[dict[str, Any]], way: str) -> None:
    for found in ranks:
        fake, real = found[f"fake tensors {way}"], found[f"gloo {way}"]
        assert fake["values"] == real["values"]
        assert fake["persistent"] == {kind: n for kind, n in real["persistent"].items() if kind != "other_tensors"}
        off = {plan: real["peaks"][plan] - UNSEEN_BYTES - nbytes for plan, nbytes in fake["peaks"].items()}
        assert all(0 <= nbytes <= BUFFER_BYTES for nbytes in off.values()), off


@pytest.mark.parametrize("way", ALONE)
def test_fake_tensors_tell_the_bytes_of_real_ones(ranks: list[dict[str, Any]], way: str) -> None:
    """On the fake process group, whose collectives let go at once, to the byte."""
    for found in ranks:
        fake, real = found[f"fake tensors {way}"], found[f"real tensors {way}"]
        assert fake["persistent"] == real["persistent"]
        assert fake["values"] == real["values"]
        assert {plan: nbytes + UNSEEN_BYTES for plan, nbytes in fake["peaks"].items()} == real["peaks"]


def test_a_model_that_does_not_divide_is_refused_alike_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    assert [found["refused"] for found in ranks] == [
        "got num_attention_heads=3, tensor_model_parallel_size=2: 3 is no multiple of 2. The next multiple is 4."
    ] * RANKS


def test_fake_tensors_are_refused_where_fsdp2_has_real_ones(ranks: list[dict[str, Any]]) -> None:
    assert all("got real parameters that FSDP2 shards" in found["real shards"] for found in ranks)


def test_a_layout_is_not_recorded_inside_a_real_group(ranks: list[dict[str, Any]]) -> None:
    assert ["is rank 0 of 2 already", "is rank 1 of 2 already"] == [found["group"][13:35] for found in ranks]
