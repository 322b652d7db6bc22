"""What a configuration derives, counts and refuses."""

import dataclasses
import re
import subprocess
import sys
from typing import Any

import pytest

from recollect.lab.models.architectures import deepseek_v3_config, gpt_config, llama_config, mixtral_config
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.sizes import NAMED_CONFIGS

DIMENSIONS: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256}

PUBLISHED = {
    "160m": 162_417_408,  # model cards on the Hugging Face hub, also of the next five
    "1b": 1_100_048_384,
    "7b": 6_738_415_616,
    "8b": 8_030_261_248,
    "13b": 13_015_864_320,
    "70b": 68_976_648_192,
    "gpt2": 124_439_808,  # what the released weights have
    "mixtral-8x7b": 46_702_792_704,  # model card
}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_published_sizes_have_the_published_number_of_parameters(name: str, count: int) -> None:
    assert NAMED_CONFIGS[name].num_parameters == count


def test_gpt3_has_174_6_billion_parameters() -> None:
    assert round(NAMED_CONFIGS["gpt3-175b"].num_parameters / 1e8) == 1746  # arXiv 2005.14165, table D.1: 174,600 M


def test_deepseek_v3_has_671_billion_parameters_of_which_37_are_active() -> None:
    config = NAMED_CONFIGS["deepseek-v3-671b"]
    without_mtp = dataclasses.replace(config, mtp_num_layers=None)
    # arXiv 2412.19437, abstract; the released weights have 671,026,419,200 with the 58 * 256 biases of the router
    assert without_mtp.num_parameters == 671_026_419_200 - 58 * 256
    assert 37.0e9 < config.num_active_parameters < 38.0e9
    assert config.num_active_parameters == without_mtp.num_active_parameters


def test_mixtral_has_13_billion_active_parameters() -> None:
    assert round(NAMED_CONFIGS["mixtral-8x7b"].num_active_parameters / 1e8) == 129  # arXiv 2401.04088: 13B


def test_fields_that_follow_from_others() -> None:
    config = TransformerConfig(**DIMENSIONS)
    assert (config.num_query_groups, config.kv_channels, config.ffn_hidden_size) == (4, 16, 256)
    assert config.moe_ffn_hidden_size == config.ffn_hidden_size
    as_megatron_writes_it = TransformerConfig(**DIMENSIONS, num_query_groups=None, kv_channels=None)  # type: ignore[arg-type]
    assert as_megatron_writes_it == config
    assert TransformerConfig(**{**DIMENSIONS, "hidden_size": 62}, kv_channels=16).kv_channels == 16


def test_what_was_derived_is_derived_again_after_a_change() -> None:
    config = TransformerConfig(**DIMENSIONS)
    changed = config.changed(hidden_size=128, num_attention_heads=8)
    assert (changed.num_query_groups, changed.kv_channels, changed.ffn_hidden_size) == (8, 16, 512)
    given = TransformerConfig(**DIMENSIONS, num_query_groups=2, kv_channels=8, ffn_hidden_size=100)
    assert given.changed(hidden_size=128, num_layers=3) == TransformerConfig(
        **{**DIMENSIONS, "hidden_size": 128, "num_layers": 3}, num_query_groups=2, kv_channels=8, ffn_hidden_size=100
    )
    assert mixtral_config(**DIMENSIONS, ffn_hidden_size=96).changed(ffn_hidden_size=32).moe_ffn_hidden_size == 32
    with pytest.raises(TypeError, match="no_such_field"):
        config.changed(no_such_field=1)


def test_layers_with_experts() -> None:
    every_third = mixtral_config(**{**DIMENSIONS, "num_layers": 5}, moe_layer_freq=3)
    assert [every_third.is_moe_layer(i) for i in range(5)] == [True, False, False, True, False]
    listed = mixtral_config(**{**DIMENSIONS, "num_layers": 3}, moe_layer_freq=[0, 1, 1])
    assert [listed.is_moe_layer(i) for i in range(4)] == [False, True, True, True]  # the last: multi-token prediction
    assert not llama_config(**DIMENSIONS).is_moe_layer(0)


@pytest.mark.parametrize("make", [gpt_config, llama_config, mixtral_config, deepseek_v3_config])
def test_architectures_leave_room_for_changes(make: Any) -> None:
    experts = {"num_moe_experts": 8} if make is deepseek_v3_config else {}
    config = make(**DIMENSIONS, **experts, layernorm_epsilon=0.5, activation_func="relu")
    assert (config.layernorm_epsilon, config.activation_func) == (0.5, "relu")
    with pytest.raises(TypeError, match="no_such_field"):
        make(**DIMENSIONS, no_such_field=1)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_layers": 0}, "num_layers: got 0, expected at least 1."),
    ({"num_layers": 2.0}, "num_layers: got 2.0, expected a whole number."),
    ({"num_attention_heads": True}, "num_attention_heads: got True, expected a whole number."),
    ({"normalization": "layernorm"}, "normalization: got 'layernorm', expected one of LayerNorm, RMSNorm."),
    ({"core_attention": "flash"}, "core_attention: got 'flash', expected one of fused, unfused."),
    ({"mtp_num_layers": 0}, "mtp_num_layers: got 0, expected at least 1, or None for none."),
    ({"init_method_std": -1.0}, "init_method_std: got -1.0, expected at least 0."),
    ({"init_method_std": float("nan")}, "init_method_std: got nan, expected at least 0."),
    ({"rotary_base": 0.0}, "rotary_base: got 0.0, expected more than 0."),
    ({"hidden_dropout": 1.0}, "hidden_dropout: got 1.0, expected a probability from 0 up to, but not including, 1."),
    ({"hidden_size": 62}, "hidden_size: got 62, expected a multiple of num_attention_heads = 4, or kv_channels set."),
    ({"num_query_groups": 3}, "num_query_groups: got 3, expected a divisor of num_attention_heads = 4."),
    (
        {"position_embedding_type": "rope", "kv_channels": 15},
        "kv_channels: got 15, expected an even number, because rotary positions rotate pairs of channels",
    ),
    (
        {"multi_latent_attention": True, "num_query_groups": 2},
        "num_query_groups: got 2, expected num_attention_heads = 4, because with multi_latent_attention",
    ),
    ({"multi_latent_attention": True, "qk_pos_emb_head_dim": 7}, "qk_pos_emb_head_dim: got 7, expected an even number"),
    (
        {"moe_shared_expert_intermediate_size": 64},
        "moe_shared_expert_intermediate_size: got 64, expected None if num_moe_experts is None",
    ),
    ({"num_moe_experts": 4, "moe_router_topk": 5}, "moe_router_topk: got 5, expected at most num_moe_experts = 4."),
    (
        {"num_moe_experts": 4, "moe_router_enable_expert_bias": True},
        "moe_router_enable_expert_bias: got True, expected False, or moe_router_score_function 'sigmoid'.",
    ),
    ({"num_moe_experts": 4, "moe_layer_freq": 0}, "moe_layer_freq: got 0, expected at least 1"),
    (
        {"num_moe_experts": 4, "moe_layer_freq": [1]},
        "moe_layer_freq: got (1,), expected an entry for each of num_layers = 2",
    ),
    ({"num_moe_experts": 4, "moe_layer_freq": [1, 2]}, "moe_layer_freq: got (1, 2), expected 1 (experts) or 0 (dense)"),
    ({"num_moe_experts": 4, "moe_router_num_groups": 2}, "moe_router_group_topk: got None, expected a number:"),
    ({"num_moe_experts": 4, "moe_router_group_topk": 2}, "moe_router_num_groups: got None, expected a number:"),
    (
        {"num_moe_experts": 4, "moe_router_num_groups": 3, "moe_router_group_topk": 1},
        "moe_router_num_groups: got 3, expected a divisor of num_moe_experts = 4.",
    ),
    (
        {"num_moe_experts": 4, "moe_router_num_groups": 2, "moe_router_group_topk": 3},
        "moe_router_group_topk: got 3, expected at most moe_router_num_groups = 2.",
    ),
    (
        {"num_moe_experts": 8, "moe_router_topk": 3, "moe_router_num_groups": 4, "moe_router_group_topk": 1},
        "moe_router_topk: got 3, expected at most 2, the experts in 1 of 4 groups.",
    ),
    ({"num_moe_experts": 4, "moe_router_dtype": "fp16"}, "moe_router_dtype: got 'fp16', expected 'fp32', or None"),
    (
        {"num_moe_experts": 4, "moe_grouped_gemm": True, "moe_ffn_hidden_size": 12},
        "moe_ffn_hidden_size: got 12, expected a multiple of 8, because grouped products read 16 bytes at once",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_impossible_configurations_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"TransformerConfig.{message}")):
        TransformerConfig(**{**DIMENSIONS, **changes})


def test_sizes_import_no_torch() -> None:
    code = "import sys, recollect.lab.models.sizes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_pattern_of_layers_follows_their_number() -> None:
    config = NAMED_CONFIGS["deepseek-v3-tiny"]
    assert config.moe_layer_freq == (0, 1, 1, 1)
    assert config.changed(num_layers=2).moe_layer_freq == (0, 1)
    assert config.changed(num_layers=6).moe_layer_freq == (0, 1, 1, 1, 1, 1)
    assert config.changed(num_layers=2, moe_layer_freq=[1, 0]).moe_layer_freq == (1, 0)
