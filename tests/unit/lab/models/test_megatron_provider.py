"""Providers: fields as in Megatron-Bridge, models and plans made from them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import recollect
from recollect.errors import ConfigError, ConfigWarning, NotYetError
from recollect.lab.models import megatron_provider as provider
from recollect.lab.models.megatron_provider import GPTModelProvider
from recollect.lab.models.sizes import NAMED_CONFIGS

SMALL = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256, "seq_length": 128}


def small(**settings: Any) -> GPTModelProvider:
    return GPTModelProvider(**{**SMALL, **settings})


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(256, (4, 129), generator=torch.Generator().manual_seed(0))
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    model.zero_grad()
    model(**batch()).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "settings",
    [
        {"recompute_granularity": "selective"},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp", "layernorm"]},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    ],
)
def test_settings_are_set_one_by_one_and_gradients_stay(settings: dict[str, Any]) -> None:
    cfg = SimpleNamespace(model=small(core_attention="unfused"))  # the shape of Megatron-Bridge's configuration
    for name, value in settings.items():
        setattr(cfg.model, name, value)
    torch.manual_seed(0)
    model = cfg.model.provide()
    before = gradients(model)
    with cfg.model.apply(model, batch()) as applied:
        after = gradients(model)
        assert applied is not None
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    plan = cfg.model.plan(model, batch())
    assert (
        plan.predicted_peak_bytes
        < recollect.classic_plan(recollect.record(model, batch()), "keep_all").predicted_peak_bytes
    )


def test_a_budget_instead() -> None:
    cfg = small()
    model = cfg.provide()
    assert cfg.plan(model, batch(), budget="90%").budget_bytes is not None
    cfg.recompute_granularity = "selective"
    with pytest.raises(
        ConfigError, match=r"got budget='90%', recompute_granularity='selective': a budget already decides what"
    ):
        cfg.plan(model, batch(), budget="90%")


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        (provider.Llama2ModelProvider7B, "7b"),
        (provider.Llama2ModelProvider13B, "13b"),
        (provider.Llama2ModelProvider70B, "70b"),
        (provider.Llama3ModelProvider8B, "8b"),
        (provider.GPTProvider175B, "gpt3-175b"),
        (provider.MixtralModelProvider8x7B, "mixtral-8x7b"),
        (provider.DeepSeekV3ModelProvider, "deepseek-v3-671b"),
    ],
)
def test_named_providers_are_the_models_of_these_names(kind: type[GPTModelProvider], size: str) -> None:
    assert kind().transformer_config() == NAMED_CONFIGS[size]
    kind().finalize()
    changed = kind(num_layers=1, moe_layer_freq=1)
    assert changed.transformer_config() == NAMED_CONFIGS[size].changed(num_layers=1, moe_layer_freq=1)


def test_derived_fields_follow_what_is_set_later() -> None:
    cfg = small()
    cfg.hidden_size = 128
    assert cfg.transformer_config().ffn_hidden_size == 512
    named = provider.GPTProvider175B(hidden_size=768, num_attention_heads=12).transformer_config()
    assert (named.ffn_hidden_size, named.kv_channels, named.num_query_groups) == (3072, 64, 12)


def test_a_subclass_sets_defaults_and_functions_are_taken_by_name() -> None:
    class Mine(provider.LlamaModelProvider):
        num_layers = 3
        activation_func = F.gelu

    config = Mine(
        hidden_size=64, num_attention_heads=4, vocab_size=250, make_vocab_size_divisible_by=128
    ).transformer_config()
    assert (config.num_layers, config.activation_func, config.vocab_size) == (3, "gelu", 256)
    assert config.normalization == "RMSNorm"
    assert not config.share_embeddings_and_output_weights


def test_a_misspelt_field_is_an_error_at_once() -> None:
    with pytest.raises(
        AttributeError, match=r"recompute_granularty: got 'full', but there is no .* Did you mean recompute_gr"
    ):
        small().recompute_granularty = "full"
    with pytest.raises(AttributeError, match=r"GPTModelProvider\.wings: got 2, .* docs/megatron_flags\.md lists them"):
        GPTModelProvider(wings=2)


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"num_layers": None, "vocab_size": None}, ConfigError, "num_layers=None, vocab_size=None: a model needs them"),
        (
            {"seq_length": 4096},
            ConfigError,
            "seq_length=4096, max_position_embeddings=2048: a learned position .* Lower seq",
        ),
        ({"recompute_granularity": "full"}, ConfigError, "full recompute needs a method"),
        ({"num_attention_heads": 5}, ValueError, r"TransformerConfig\.hidden_size: got 64, expected a multiple of"),
        ({"fp16": True}, NotYetError, "fp16=True: not yet: loss scaling. Set bf16 instead"),
        ({"fp4": "e2m1"}, NotYetError, "fp4='e2m1': not yet: models that compute in 4 bits"),
        (
            {"tensor_model_parallel_size": 2},
            NotYetError,
            "tensor_model_parallel_size=2: not yet: models on more than one",
        ),
        ({"context_parallel_size": 2}, NotYetError, "context_parallel_size=2: not yet: models on more than one device"),
    ],
)
def test_what_cannot_be_provided(settings: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        small(**settings).provide()


def test_choices_of_kernels_have_no_effect_and_say_so() -> None:
    with pytest.warns(ConfigWarning, match="without effect here: masked_softmax_fusion; kernels are PyTorch's"):
        small(masked_softmax_fusion=True).finalize()
