"""The reference models in each layout, over gloo in two processes: gradients, plans, and what fake tensors say of them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from parallel_programs import ALONE, MANY_CHUNKS, MANY_TOKENS, MANY_WORDS, OPTIONS, RANKS, WAYS, WIDTH
from rank_processes import rank_results

SUPPORT = Path(__file__).parents[1] / "support"
pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs PyTorch with the gloo backend")

# Split products and sums add in another order: a few units in the last place of fp32, which is 1.2e-7.
FARTHEST = 2e-6
# What every prediction from real tensors adds, and none from fake ones.
UNSEEN_BYTES = 1024
# gloo's threads let go of what they sent a moment late: here at most the embedding that FSDP2 has gathered, and a norm.
BUFFER_BYTES = 2 * 64 * 32 * 4 + 128


ranks = rank_results(SUPPORT / "parallel_programs.py", RANKS)


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
        fake, real = ranks[0][f"fake tensors {way}"], found[f"gloo {way}"]
        assert fake["values"] == real["values"]
        assert fake["persistent"] == {kind: n for kind, n in real["persistent"].items() if kind != "other_tensors"}
        off = {plan: real["peaks"][plan] - UNSEEN_BYTES - nbytes for plan, nbytes in fake["peaks"].items()}
        assert all(0 <= nbytes <= BUFFER_BYTES for nbytes in off.values()), off


@pytest.mark.parametrize("way", ALONE)
def test_fake_tensors_tell_the_bytes_of_real_ones(ranks: list[dict[str, Any]], way: str) -> None:
    """On the fake process group, whose collectives let go at once, to the byte."""
    fake, real = (ranks[0][f"{kind} tensors {way}"] for kind in ("fake", "real"))
    assert fake["persistent"] == real["persistent"]
    assert fake["values"] == real["values"]
    assert {plan: nbytes + UNSEEN_BYTES for plan, nbytes in fake["peaks"].items()} == real["peaks"]


@pytest.mark.parametrize("way", ["tensor", "sequence"])
@pytest.mark.parametrize("model", ["llama", "gpt"])
def test_the_loss_in_chunks_has_the_gradients_of_the_loss_in_one_piece(
    ranks: list[dict[str, Any]], model: str, way: str
) -> None:
    assert max(found[f"chunked {model} {way}"] for found in ranks) <= FARTHEST
    assert all(found[f"chunked equal {way}"] for found in ranks)


@pytest.mark.parametrize("way", ["tensor", "sequence", "both"])
def test_fake_tensors_tell_the_bytes_of_the_loss_in_chunks(ranks: list[dict[str, Any]], way: str) -> None:
    real, fake, whole = (
        ranks[0][name] for name in (f"chunked {way} False", f"chunked {way} True", f"fake tensors {way}")
    )
    assert fake["values"] == real["values"]
    assert {plan: nbytes + UNSEEN_BYTES for plan, nbytes in fake["peaks"].items()} == real["peaks"]
    assert fake["peaks"]["full"] < whole["peaks"]["full"]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_split_head_has_the_loss_of_a_whole_one(ranks: list[dict[str, Any]], options: str) -> None:
    """In fp64, and the sums are others: a few units in its last place of a loss whose terms are a hundred times as large."""
    assert max(found[f"farthest {options}, {way}"] for found in ranks for way in ("R", "S(1)")) < 1e-14
    assert max(found["farthest uneven"] for found in ranks) < 1e-14


def test_only_one_chunk_of_logits_is_alive(ranks: list[dict[str, Any]]) -> None:
    chunk_bytes = MANY_TOKENS // MANY_CHUNKS * MANY_WORDS * 4
    weight_bytes = MANY_WORDS * WIDTH * 4
    for found in ranks:
        # A tenth for what there is once a token.
        assert chunk_bytes < found["peak False"] < 1.1 * chunk_bytes
        assert chunk_bytes + weight_bytes < found["peak True"] < 1.1 * chunk_bytes + weight_bytes


# A layout is recorded outside a real group, on fake tensors unless FSDP2 has sharded real ones.
REFUSED = {
    "odd heads": "got num_attention_heads=3, tensor_model_parallel_size=2: 3 is not a multiple of 2. The next multiple is 4.",
    "real shards": "got real parameters that FSDP2 shards",
    "group": "is rank {rank} of 2 already",
    "no group": "weight is a DTensor of shape [46, 12], expected a whole tensor",
    "split by columns": "weight is a DTensor of shape [46, 12] (Shard(dim=1),), expected hidden states",
    "split by channels": "hidden is a DTensor of shape [2, 10, 12] (Shard(dim=2),), expected",
    "one word": "got a weight of 1 words for 2 ranks, expected some for each rank",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_alike_on_all_ranks(ranks: list[dict[str, Any]], case: str) -> None:
    for rank, found in enumerate(ranks):
        assert REFUSED[case].format(rank=rank) in found[f"refused {case}"]


def test_a_label_beyond_the_vocabulary_has_an_infinite_loss(ranks: list[dict[str, Any]]) -> None:
    assert [found["beyond the vocabulary"] for found in ranks] == [float("inf")] * RANKS
