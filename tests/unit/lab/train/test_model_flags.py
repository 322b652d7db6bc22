"""Flags of a model: what it starts from, what they change, and what they must not say together."""

from typing import Any

import pytest

from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.sizes import NAMED_CONFIGS
from recollect.lab.train.model_flags import ExpertFlags, Fp8Flags, LatentFlags, ModelFlags, parse_layer_freq


def test_without_flags_it_is_the_demo_and_a_name_is_that_model() -> None:
    assert ModelFlags().dimensions() == NAMED_CONFIGS["demo"]
    assert ModelFlags(num_layers=3).dimensions() == NAMED_CONFIGS["demo"].changed(num_layers=3)
    for name, config in NAMED_CONFIGS.items():
        assert ModelFlags(size=name).dimensions() == config  # type: ignore[arg-type]


def test_dimensions_without_a_name_are_pretrain_gpts() -> None:
    model = ModelFlags(num_layers=2, hidden_size=512).dimensions(vocab_size=300, seq_length=96)
    assert model == TransformerConfig(
        num_layers=2,
        hidden_size=512,
        num_attention_heads=4,
        vocab_size=300,
        ffn_hidden_size=2048,
        max_position_embeddings=96,
        share_embeddings_and_output_weights=True,
        q_lora_rank=None,
        kv_lora_rank=32,
    )
    assert ModelFlags(num_layers=2, hidden_size=64).dimensions().num_attention_heads == 1


def test_a_llama_in_megatrons_words_is_the_llama_of_that_name() -> None:
    flags = ModelFlags(
        num_layers=32,
        hidden_size=4096,
        ffn_hidden_size=14_336,
        num_attention_heads=32,
        group_query_attention=True,
        num_query_groups=8,
        vocab_size=128_256,
        max_position_embeddings=8192,
        position_embedding_type="rope",
        rotary_base=500_000.0,
        normalization="RMSNorm",
        swiglu=True,
        disable_bias_linear=True,
        untie_embeddings_and_output_weights=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    # What is left of pretrain_gpt's defaults is of latent attention, which this model has not.
    assert flags.dimensions().changed(q_lora_rank=512, kv_lora_rank=512) == NAMED_CONFIGS["8b"]


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        ({"swiglu": True}, {"gated_linear_unit": True, "activation_func": "silu", "ffn_hidden_size": 640}),
        ({"openai_gelu": True}, {"activation_func": "gelu_tanh", "ffn_hidden_size": 1024}),
        ({"use_rotary_position_embeddings": True}, {"position_embedding_type": "rope"}),
        ({"group_query_attention": True, "num_attention_heads": 4}, {"num_query_groups": 1}),
        ({"untie_embeddings_and_output_weights": True}, {"share_embeddings_and_output_weights": False}),
        ({"tie_embeddings": False}, {"share_embeddings_and_output_weights": False}),
        ({"tie_embeddings": True}, {"share_embeddings_and_output_weights": True}),
        ({"attention_backend": "unfused"}, {"core_attention": "unfused"}),
        ({"attention_backend": "flash"}, {"core_attention": "fused"}),
        ({"transformer_impl": "local"}, {"core_attention": "unfused"}),
        ({"transformer_impl": "local", "use_flash_attn": True}, {"core_attention": "fused"}),
        ({"transformer_impl": "transformer_engine"}, {"core_attention": "fused"}),
        ({"norm_epsilon": 1e-6}, {"layernorm_epsilon": 1e-6}),
        ({"vocab_size": 1000, "make_vocab_size_divisible_by": 128}, {"vocab_size": 1024}),
        (
            {"experts": ExpertFlags(num_experts=4, moe_layer_freq="[0]*1+[1]")},
            {"num_moe_experts": 4, "moe_layer_freq": (0, 1)},
        ),
        (
            {"latent": LatentFlags(multi_latent_attention=True, kv_lora_rank=16), "position_embedding_type": "rope"},
            {"multi_latent_attention": True, "kv_lora_rank": 16, "q_lora_rank": None},
        ),
        (
            {"eight_bits": Fp8Flags(fp8_format="hybrid", fp8_margin=1, first_last_layers_bf16=True)},
            {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_margin": 1, "first_last_layers_bf16": True},
        ),
        (
            {"eight_bits": Fp8Flags(fp8_format="e4m3", fp8_recipe="mxfp8", fp8_emulated=True)},
            {"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_emulated": True},
        ),
    ],
)
def test_what_a_flag_means(flags: dict[str, Any], fields: dict[str, Any]) -> None:
    model = ModelFlags(num_layers=2, hidden_size=256, **flags).dimensions()
    assert {name: getattr(model, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"tie_embeddings": True, "untie_embeddings_and_output_weights": True},
            "tie_embeddings = True and untie_.* got both",
        ),
        (
            {"use_rotary_position_embeddings": True, "position_embedding_type": "learned_absolute"},
            "use_rotary_position_embeddings = True and position_embedding_type = learned_absolute: got both, expected one",
        ),
        ({"use_flash_attn": True, "attention_backend": "local"}, "use_flash_attn = True and attention_backend = local"),
        ({"make_vocab_size_divisible_by": 0}, "make_vocab_size_divisible_by: got 0, expected at least 1"),
        ({"num_attention_heads": 5}, r"TransformerConfig\.hidden_size: got 256, expected a multiple of"),
    ],
)
def test_flags_that_do_not_fit_together(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelFlags(size="demo", **flags)


@pytest.mark.parametrize(
    ("text", "value"), [("2", 2), ("[0,1,1]", [0, 1, 1]), ("([0]*3+[1]*2)", [0, 0, 0, 1, 1]), ("2*[1,0]", [1, 0, 1, 0])]
)
def test_layer_frequencies(text: str, value: object) -> None:
    assert parse_layer_freq(text) == value


@pytest.mark.parametrize(
    "text",
    ["", "0", "-1", "1.5", "[2]", "[0]*", "__import__('os')", "[1]*10**9", "[1]*9999*9999", "True", "[[1]]", "1+2*[1]"],
)
def test_what_is_no_layer_frequency(text: str) -> None:
    with pytest.raises(ValueError, match="moe_layer_freq: got .* expected a number of at least 1 or a list of 0 and 1"):
        parse_layer_freq(text)
