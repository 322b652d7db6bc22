"""The reference decoder with GPT's and Llama's parts: sizes, causality, loss, dtypes, dropout, initialisation."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import recollect
from recollect.errors import DataError
from recollect.lab.models.architectures import gpt_config
from recollect.lab.models.attention import FusedCoreAttention, UnfusedCoreAttention, bias_of_last_positions
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.gpt import GPTModel
from recollect.lab.models.sizes import NAMED_CONFIGS
from tiers import long_but

NAMES = ["gpt-tiny", "llama-tiny"]


def named(name: str, **changes: Any) -> TransformerConfig:
    return dataclasses.replace(NAMED_CONFIGS[name], **changes)


def tokens_of(config: TransformerConfig, sequences: int = 2, length: int = 16) -> Tensor:
    return torch.randint(config.vocab_size, (sequences, length))


@pytest.mark.parametrize("name", ["tiny", "demo", "160m", "1b", "7b", "8b", "13b", "70b", "gpt2", "gpt3-175b"])
def test_named_models_have_as_many_parameters_as_their_configuration_says(name: str) -> None:
    with torch.device("meta"):
        assert GPTModel(NAMED_CONFIGS[name]).num_parameters == NAMED_CONFIGS[name].num_parameters


COMBINATIONS = [
    *itertools.product(["LayerNorm", "RMSNorm"], ["learned_absolute", "rope"], *[[True, False]] * 4, [1, 4])
]


@pytest.mark.parametrize(
    ("normalization", "positions", "is_gated", "has_bias", "has_qkv_bias", "is_tied", "groups"),
    # Of each two settings every pair of values is quick.
    long_but(COMBINATIONS[::7], COMBINATIONS, are_rows=True),
)
def test_the_formula_counts_the_parameters_of_every_combination(
    normalization: Any, positions: Any, is_gated: bool, has_bias: bool, has_qkv_bias: bool, is_tied: bool, groups: int
) -> None:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=24,
        num_attention_heads=4,
        vocab_size=17,
        num_query_groups=groups,
        kv_channels=10,
        ffn_hidden_size=28,
        max_position_embeddings=5,
        normalization=normalization,
        position_embedding_type=positions,
        gated_linear_unit=is_gated,
        add_bias_linear=has_bias,
        add_qkv_bias=has_qkv_bias,
        share_embeddings_and_output_weights=is_tied,
    )
    with torch.device("meta"):
        model = GPTModel(config)
        assert model.num_parameters == config.num_parameters == config.num_active_parameters
        assert model(tokens_of(config, length=5)).logits.shape == (2, 5, 17)


def test_what_tells_kernels_of_cuda_the_last_positions_is_recorded() -> None:

    class LastPositions(torch.nn.Module):
        def forward(self, x_BHTC: Tensor) -> Tensor:
            bias = bias_of_last_positions(3, x_BHTC.shape[2])
            return torch.nn.functional.scaled_dot_product_attention(x_BHTC[:, :, -3:], x_BHTC, x_BHTC, attn_mask=bias)

    model, x_BHTC = LastPositions(), torch.randn(1, 2, 5, 8, requires_grad=True)
    profile = recollect.record(model, x_BHTC, loss_fn=torch.sum, units=[""])
    with recollect.apply(model, recollect.classic_plan(profile, "full")):
        found = model(x_BHTC)
    whole = FusedCoreAttention(0.0)(*[x_BHTC.transpose(1, 2)] * 3)
    torch.testing.assert_close(found.transpose(1, 2).flatten(2), whole[:, -3:])


def test_what_tells_of_the_last_positions_takes_no_memory() -> None:
    """Context parallelism over 8 ranks of 262,144 positions; as a mask it would be 32 GiB, twice."""
    assert bias_of_last_positions(16_384, 262_144).untyped_storage().nbytes() == 0


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_fused_and_unfused_core_attention_agree(groups: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 9, 4, 6, dtype=dtype)
    k, v = torch.randn(2, 9, groups, 6, dtype=dtype), torch.randn(2, 9, groups, 5, dtype=dtype)
    fused, unfused = FusedCoreAttention(0.0)(q, k, v), UnfusedCoreAttention(0.0)(q, k, v)
    assert fused.shape == (2, 9, 4 * 5)
    # bf16 has 8 bits: each of scores, probabilities and sums is off by up to 2^-9 of values of size 1 to 4
    tolerance = 1e-12 if dtype is torch.float64 else 4e-2
    torch.testing.assert_close(fused, unfused, atol=tolerance, rtol=0)


def test_more_positions_than_are_learned_are_refused() -> None:
    model = GPTModel(named("gpt-tiny", max_position_embeddings=8))
    with pytest.raises(DataError, match="tokens: got 9 positions, expected at most max_position_embeddings = 8"):
        model(tokens_of(model.config, length=9))
    rotary = GPTModel(named("llama-tiny", max_position_embeddings=8))
    assert rotary(tokens_of(rotary.config, length=9)).logits.shape == (2, 9, 256)


@pytest.mark.parametrize("name", NAMES)
def test_loss_is_fp32_ignores_minus_100_and_starts_near_uniform(name: str) -> None:
    torch.manual_seed(0)
    model = GPTModel(named(name, share_embeddings_and_output_weights=False), compute_dtype=torch.bfloat16).eval()
    tokens = tokens_of(model.config, length=64)
    out = model(tokens, labels=tokens)
    assert out.logits.dtype == torch.bfloat16
    assert out.loss.dtype == torch.float32
    assert abs(out.loss.item() - torch.log(torch.tensor(256.0)).item()) < 0.1  # logits near zero
    half = tokens.clone()
    half[:, 32:] = -100
    expected = torch.nn.functional.cross_entropy(out.logits.float()[:, :32].flatten(0, 1), tokens[:, :32].flatten())
    assert torch.equal(model(tokens, labels=half).loss, expected)


@pytest.mark.parametrize("name", NAMES)
def test_bf16_compute_leaves_weights_and_gradients_in_fp32(name: str) -> None:
    model = GPTModel(named(name), compute_dtype=torch.bfloat16)
    tokens = tokens_of(model.config, sequences=1)
    assert model.decoder.layers[0].self_attention.linear_qkv(torch.zeros(1, 64).bfloat16()).dtype == torch.bfloat16
    model(tokens, labels=tokens).loss.backward()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_loss_in_chunks_is_the_loss(name: str) -> None:
    torch.manual_seed(0)
    model = GPTModel(named(name)).eval()
    tokens = tokens_of(model.config)
    expected = model(tokens, labels=tokens).loss
    model.loss_chunks = 3
    out = model(tokens, labels=tokens)
    assert out.logits is None
    torch.testing.assert_close(out.loss, expected, atol=1e-5, rtol=0)  # sums of 32 terms near 5 in another order


def test_new_weights_follow_gpt2() -> None:
    torch.manual_seed(0)
    model = GPTModel(gpt_config(num_layers=8, hidden_size=128, num_attention_heads=2, vocab_size=512))
    layer = model.decoder.layers[3]
    for matrix, std in [
        (model.embedding.word_embeddings.weight, 0.02),
        (model.embedding.position_embeddings.weight, 0.02),
        (layer.self_attention.linear_qkv.weight, 0.02),
        (layer.mlp.linear_fc1.weight, 0.02),
        (layer.self_attention.linear_proj.weight, 0.005),  # 0.02 / sqrt(2 * 8)
        (layer.mlp.linear_fc2.weight, 0.005),
    ]:
        # 16,384 draws or more: the deviation of the sample is within 0.6 %, five times that is 3 %
        assert abs(matrix.std().item() / std - 1) < 0.03
    assert not layer.mlp.linear_fc1.bias.any()
    assert (layer.input_layernorm.weight == 1).all()
