"""The reference decoder: sizes, causality, loss, dtypes, dropout, initialisation, and what mixtures of experts add."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import recollect
from recollect.errors import DataError
from recollect.lab.models.architectures import gpt_config
from recollect.lab.models.attention import (
    FusedCoreAttention,
    UnfusedCoreAttention,
    bias_of_last_positions,
)
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.gpt import GPTModel
from recollect.lab.models.router import TopKRouter
from recollect.lab.models.sizes import NAMED_CONFIGS
from tiers import long_but

NAMES = ["gpt-tiny", "llama-tiny"]
MIXTURES = ["mixtral-tiny", "deepseek-v3-tiny"]


def named(name: str, **changes: Any) -> TransformerConfig:
    return dataclasses.replace(NAMED_CONFIGS[name], **changes)


def tokens_of(config: TransformerConfig, sequences: int = 2, length: int = 16) -> Tensor:
    return torch.randint(config.vocab_size, (sequences, length))


NAMED = [(name, {}) for name in ("tiny", "demo", "160m", "1b", "7b", "8b", "13b", "70b", "gpt2", "gpt3-175b")]
NAMED += [
    (name, changes)
    for name in (*MIXTURES, "mixtral-8x7b", "deepseek-v3-671b")
    for changes in ({}, {"add_bias_linear": True, "normalization": "LayerNorm"}, {"moe_layer_freq": 2})
]


@pytest.mark.parametrize(("name", "changes"), NAMED)
def test_models_have_as_many_parameters_as_their_configuration_says(name: str, changes: dict[str, Any]) -> None:
    config = named(name, **changes)
    with torch.device("meta"):
        assert GPTModel(config).num_parameters == config.num_parameters


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


def model_of(name: str, **changes: Any) -> GPTModel:
    torch.manual_seed(0)
    return GPTModel(named(name, **changes))


def batch_of(length: int = 12, sequences: int = 2) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(256, (sequences, length + 1))
    return tokens[:, :-1], tokens[:, 1:]


def assert_equal_but_for_rounding(left: Tensor, right: Tensor) -> None:
    """A later token that goes to another expert changes how many rows a product has, and so the order of its sums."""
    torch.testing.assert_close(left, right, rtol=0, atol=1e-5)


def test_loss_in_evaluation_is_the_next_tokens_alone() -> None:
    model = model_of("deepseek-v3-tiny").eval()
    out = model(*batch_of())
    assert out.loss is out.lm_loss
    logits, labels = model(batch_of()[0]).logits, batch_of()[1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(out.loss, expected)


def test_loss_in_training_has_the_routers_and_further_tokens_in_it() -> None:
    model = model_of("deepseek-v3-tiny", mtp_num_layers=2, mtp_loss_scaling_factor=0.5, moe_aux_loss_coeff=0.125)
    tokens, labels = batch_of()
    seen: list[Any] = []
    for layer in model.modules():
        if isinstance(layer, TopKRouter):
            layer.register_forward_hook(lambda module, args, routing: seen.append(routing.statistics.aux_loss))
    outputs: list[Tensor] = []
    model.mtp.register_forward_hook(lambda module, args, output: outputs.extend(output[0]))
    out = model(tokens, labels)
    assert len(seen) == 5  # three layers of the decoder, two of further tokens
    further = []
    for depth, x in enumerate(outputs, 1):
        logits = model.output_layer(x)[:, :-depth].flatten(0, 1)
        further.append(torch.nn.functional.cross_entropy(logits, labels[:, depth:].flatten()))
    expected = out.lm_loss + 0.5 * (further[0] + further[1]) / 2 + sum(seen)
    torch.testing.assert_close(out.loss, expected)


def test_a_depth_sees_the_tokens_that_it_may_see() -> None:
    """Depth k at position t sees tokens up to t + k, and predicts that at t + k + 1."""
    model = model_of("deepseek-v3-tiny", mtp_num_layers=2)
    tokens, labels = batch_of(sequences=1)
    outputs: list[list[Tensor]] = []
    model.mtp.register_forward_hook(lambda module, args, output: outputs.append(output[0]))
    changed = tokens.clone()
    changed[0, 8] = (changed[0, 8] + 1) % 256
    for each in (tokens, changed):
        model(each, labels)
    for depth, (before, after) in enumerate(zip(*outputs, strict=True), 1):
        first = 8 - depth
        assert_equal_but_for_rounding(before[:, :first], after[:, :first])
        assert not torch.isclose(before[:, first], after[:, first]).all()


@pytest.mark.parametrize("chunks", [1, 2])
def test_sequences_without_labels_further_on(chunks: int) -> None:
    """Short ones, and those that have a label at their beginning only: the depths have nothing to predict."""
    model = model_of("deepseek-v3-tiny", mtp_num_layers=3, moe_aux_loss_coeff=0.0)
    model.loss_chunks = chunks
    tokens, labels = batch_of()
    only_first = torch.full_like(labels, -100)
    only_first[:, 0] = labels[:, 0]
    for each, targets in ((tokens, only_first), (tokens[:, :1], labels[:, :1]), (tokens[:, :2], labels[:, :2])):
        out = model(each, targets)
        out.loss.backward()
        assert out.loss.isfinite()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        if each.shape[1] != 2:
            assert torch.equal(out.loss, out.lm_loss)


def counts(model: GPTModel) -> list[int]:
    routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
    return [int(router.tokens_per_expert.sum()) for router in routers if router.tokens_per_expert is not None]


def test_tokens_are_counted_in_training_only_and_added_up() -> None:
    model = model_of("deepseek-v3-tiny")
    tokens, labels = batch_of()
    routed = tokens.numel() * 4
    model(tokens, labels).loss.backward()
    assert counts(model) == [routed] * 4
    model(tokens, labels).loss.backward()
    assert counts(model) == [2 * routed] * 4
    with torch.no_grad():
        model(tokens, labels)
    model.eval()(tokens, labels)
    assert counts(model) == [2 * routed] * 4
    model.update_expert_bias()
    assert counts(model) == [0] * 4
    biases = [module.expert_bias for module in model.modules() if isinstance(module, TopKRouter)]
    assert all(bias is not None and {abs(round(b, 6)) for b in bias.tolist()} <= {0.0, 0.001} for bias in biases)
    assert any(bias is not None and bias.any() for bias in biases)
