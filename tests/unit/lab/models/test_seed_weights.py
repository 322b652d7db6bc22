"""The weights of a seed: what constructors draw from, and the same bits for whoever draws whichever part."""

import math

import pytest
import torch
from torch import Tensor

from recollect.lab.models.gpt import GPTModel
from recollect.lab.models.seed_weights import BLOCK_ELEMENTS, SeedWeights
from recollect.lab.models.sizes import NAMED_CONFIGS

CPU = torch.device("cpu")
TINY = ("gpt-tiny", "llama-tiny", "mixtral-tiny", "deepseek-v3-tiny")
# Three blocks, of which the last is smaller.
WIDE = NAMED_CONFIGS["llama-tiny"].changed(vocab_size=40_000, num_layers=1)


def drawn(weights: SeedWeights, name: str, whole: Tensor, *places: slice) -> Tensor:
    """Draw the part of a parameter that has these places in its first dimensions."""
    part = torch.full_like(whole, torch.nan)[places]
    weights.write(name, part, [*(place.start for place in places), *[0] * (whole.dim() - len(places))])
    return part


@pytest.mark.parametrize("name", TINY)
def test_they_are_distributed_as_constructors_draw_them(name: str) -> None:
    model = GPTModel(NAMED_CONFIGS[name])
    weights = SeedWeights(model, 1, CPU)
    for path, parameter in model.named_parameters():
        built, found = parameter.detach(), drawn(weights, path, parameter.detach())
        if built.std() == 0:
            assert torch.equal(built, found), path
            continue
        off = 5 / math.sqrt(built.numel())  # five times the standard error of the mean in standard deviations
        std = built.std().item()
        assert found.std().item() == pytest.approx(std, rel=off), path
        assert abs(found.mean().item()) < off * std, path


@pytest.mark.parametrize(
    ("path", "places"),
    [
        ("embedding.word_embeddings.weight", [slice(0, 1), slice(0, 64)]),
        ("embedding.word_embeddings.weight", [slice(16_380, 33_000)]),
        ("embedding.word_embeddings.weight", [slice(39_999, 40_000), slice(3, 5)]),
        ("embedding.word_embeddings.weight", [slice(20_000, 20_000)]),
        ("output_layer.weight", [slice(100, 17_000), slice(60, 64)]),
        ("decoder.final_layernorm.weight", [slice(3, 9)]),
    ],
)
def test_any_part_is_that_of_the_whole(path: str, places: list[slice]) -> None:
    with torch.device("meta"):
        weights = SeedWeights(GPTModel(WIDE), 1, CPU)
    whole = drawn(weights, path, torch.empty(64) if "norm" in path else torch.empty(40_000, 64))
    assert torch.equal(drawn(weights, path, whole, *places), whole[tuple(places)])
    assert whole[:1].isfinite().all() and whole[-1:].isfinite().all()


def test_any_part_of_a_stack_of_matrices_is_that_of_the_whole() -> None:
    model = GPTModel(NAMED_CONFIGS["mixtral-tiny"])
    weights, path = SeedWeights(model, 1, CPU), "decoder.layers.1.mlp.experts.linear_fc1.weight"
    whole = drawn(weights, path, model.get_parameter(path).detach())
    for places in ([slice(2, 5)], [slice(1, 3), slice(7, 90)], [slice(0, 8), slice(5, 6), slice(1, 40)]):
        assert torch.equal(drawn(weights, path, whole, *places), whole[tuple(places)])
    # Matrices have generators of their own.
    assert not torch.equal(whole[0], whole[1])


def test_no_two_blocks_seeds_or_parameters_are_alike() -> None:
    with torch.device("meta"):
        model = GPTModel(WIDE)
    words, head = "embedding.word_embeddings.weight", "output_layer.weight"
    whole = torch.empty(40_000, 64)
    found = [drawn(SeedWeights(model, seed, CPU), path, whole) for seed, path in ((1, words), (1, head), (2, words))]
    blocks = [block for tensor in found for block in tensor.flatten().split(BLOCK_ELEMENTS)[:2]]
    correlation = torch.corrcoef(torch.stack(blocks)) - torch.eye(len(blocks))
    assert correlation.abs().max() < 5 / math.sqrt(BLOCK_ELEMENTS)


def test_a_tied_matrix_has_the_weights_of_the_embedding() -> None:
    tied = GPTModel(NAMED_CONFIGS["llama-tiny"].changed(share_embeddings_and_output_weights=True))
    weights, whole = SeedWeights(tied, 1, CPU), tied.output_layer.weight.detach()
    words, head = (drawn(weights, f"{path}.weight", whole) for path in ("embedding.word_embeddings", "output_layer"))
    assert torch.equal(words, head)
