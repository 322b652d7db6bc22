"""Mixtral and DeepSeek-V3 as whole models: sizes, names, latent attention, multi-token prediction, what the loss is made of."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from recollect.lab.models.attention import LatentAttention
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.gpt import GPTModel
from recollect.lab.models.router import TopKRouter
from recollect.lab.models.sizes import NAMED_CONFIGS

NAMES = ["mixtral-tiny", "deepseek-v3-tiny"]


def named(name: str, **changes: Any) -> TransformerConfig:
    return dataclasses.replace(NAMED_CONFIGS[name], **changes)


def model_of(name: str, **changes: Any) -> GPTModel:
    torch.manual_seed(0)
    return GPTModel(named(name, **changes))


def batch_of(length: int = 12, sequences: int = 2) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(256, (sequences, length + 1))
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize("name", [*NAMES, "mixtral-8x7b", "deepseek-v3-671b"])
@pytest.mark.parametrize(
    "changes", [{}, {"add_bias_linear": True, "normalization": "LayerNorm"}, {"moe_layer_freq": 2}]
)
def test_models_have_as_many_parameters_as_their_configuration_says(name: str, changes: dict[str, Any]) -> None:
    config = named(name, **changes)
    with torch.device("meta"):
        assert GPTModel(config).num_parameters == config.num_parameters


def assert_equal_but_for_rounding(left: Tensor, right: Tensor) -> None:
    """A later token that goes to another expert changes how many rows a product has, and so the order of its sums."""
    torch.testing.assert_close(left, right, rtol=0, atol=1e-5)


def test_latent_attention_turns_positions() -> None:
    """Without rotary positions, attention does not know the order of what it sees."""
    torch.manual_seed(0)
    model = model_of("deepseek-v3-tiny")
    attention = model.decoder.layers[0].self_attention
    assert isinstance(attention, LatentAttention)
    x = torch.randn(1, 6, 64)
    rotary = model.rotary_pos_emb(x)
    swapped = x[:, [1, 0, 2, 3, 4, 5]]
    assert not torch.allclose(attention(x, rotary)[:, 5], attention(swapped, rotary)[:, 5], rtol=1e-3)
    still = rotary._replace(cos_T1C=torch.ones_like(rotary.cos_T1C), sin_T1C=torch.zeros_like(rotary.sin_T1C))
    torch.testing.assert_close(attention(x, still)[:, 5], attention(swapped, still)[:, 5])


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
