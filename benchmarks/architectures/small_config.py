"""Shrink any configuration class of transformers by the names of its fields."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from architectures.special_sizes import SPECIAL_SIZES

__all__ = ["IMAGE_SIZE", "VOCABULARY", "WIDTH", "small_config"]

VOCABULARY = 128
WIDTH = 64
IMAGE_SIZE = 32
_LAYERS = 3
_HEADS = 4

# The first rule whose pattern matches the whole name of a field decides. Only fields whose default is an integer or a list of
# integers are changed, and a few that are None.
_RULES: tuple[tuple[str, int], ...] = (
    (r"vocab_size|vocab_size_per_layer_input|num_embeddings", VOCABULARY),
    (r"(pad|bos|sep|cls|unk)_token_id", 0),
    (r"(eos|decoder_start|forced_\w+|mask|image|video|audio|bo\w|eo\w|\w+)_token_(id|index)", 2),
    (r"num_key_value_heads|num_kv_heads|n_kv_heads|multi_query_heads", 2),
    (r"(mamba|ssm|linear_num_value|lru)_?(n|num)?_?heads|linear_num_value_heads", 8),
    (r"linear_num_key_heads", 4),
    (r"qk_rope_head_dim|rotary_dim|rope_head_dim|mamba_d_head", 16),
    (r"\w*head_dim|d_kv|attention_key_channels|\w*head_size|kv_channels", 16),
    (r"(\w+_)?(n_head|n_heads|num_heads|num_attention_heads|attention_heads|n_layer_heads)", _HEADS),
    (r"num_nextn_predict_layers|first_k_dense_replace", 1),
    (r"decoder_sparse_step|encoder_sparse_step|interleave_moe_layer_step", 1),
    (r"num_hidden_groups|inner_group_num", 1),
    (
        r"(\w+_)?(depth|n_layer|n_layers|num_layers|num_hidden_layers|num_decoder_layers|num_encoder_layers|encoder_layers|decoder_layers|num_blocks)",
        _LAYERS,
    ),
    (r"n_group|num_expert_group", 2),
    (r"topk_group", 1),
    (
        r"(num|n)_(\w+_)?experts_per_tok(en)?|moe_topk?|moe_top_k|num_selected_experts|moe_k|top_k_experts|num_experts_per_token",
        2,
    ),
    (r"(moe_)?(num|n)_(routed_|local_)?experts|moe_num_experts", 4),
    (r"\w*shared_experts?|num_shared_expert", 1),
    (
        r"moe_intermediate_size|\w*expert\w*_intermediate_size|shared_expert_intermediate_size|expert_ffn_hidden_size",
        32,
    ),
    (
        r"\w*(intermediate_size|ffn_dim|ffn_hidden_size|d_ff|dim_feedforward|ffn_embed_dim|feed_forward_size)|d_inner|ff_dim|mlp_dim",
        96,
    ),
    (r"q_lora_rank|kv_lora_rank|\w*lora_rank\w*|\w*low_rank\w*|compression_rank", 16),
    (r"state_size|mamba_d_state|ssm_state_size|d_state|index_head_dim|time_step_rank|mamba_dt_rank|dt_rank", 16),
    (r"mamba_n_groups|n_groups|mamba_num_groups", 1),
    (r"\w*chunk_size|chunk_len", 8),
    (r"sliding_window|attention_window\w*|local_attention|window_size_local|attention_chunk_size", 8),
    (
        r"(\w+_)?(max_position_embeddings|n_positions|max_seq_len|max_sequence_length|max_seqlen|n_ctx|max_target_positions)",
        64,
    ),
    (r"max_source_positions", 32),
    (r"num_mel_bins|num_mel_bands|input_feat_per_channel|feature_size|n_mels|input_dim_mel", 16),
    (r"image_size|input_size|img_size", IMAGE_SIZE),
    (r"hidden_size_per_layer_input|embedding_size|word_embed_proj_dim|conv_out_channels|input_embed_dim", WIDTH),
    (
        r"hidden_size|d_model|n_embd|dim|emb_dim|embed_dim|hidden_dim|encoder_hidden_dim|d_embed|model_dim|lru_width|hidden_channels",
        WIDTH,
    ),
    (
        r"decoder_hidden_size|encoder_hidden_size|projection_dim|out\w*_hidden_size|text_hidden_size|condition_dim|attention_hidden_size|\w*proj_size|\w*_proj_dim|codevector_dim",
        WIDTH,
    ),
    (r"num_codevectors_per_group", 16),
    (r"num_conv_pos_embeddings", 16),
    (r"num_conv_pos_embedding_groups", 4),
)
_LISTS: Mapping[str, int] = {"conv_dim": 32, "tdnn_dim": 32, "conv_channels": 32}
# What the class would compute from other fields, or demand.
_MISSING: Mapping[str, int] = {
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
}


def small_config(config_class: type[PreTrainedConfig], like: PreTrainedConfig | None = None) -> PreTrainedConfig:
    """Return a small configuration: width 64, three layers, four heads, 128 words.

    Args:
        config_class: any configuration class of transformers.
        like: the part of a larger configuration that it stands for; it returns the same feature maps.

    Raises:
        Exception: whatever the class raises where the sizes do not go together.
    """
    fields = inspect.signature(config_class.__init__).parameters
    sizes = {name: small for name, field in fields.items() if (small := _small(name, field.default)) is not None}
    if "kv_lora_rank" in fields and "num_key_value_heads" in sizes:
        sizes["num_key_value_heads"] = _HEADS  # latent attention has no groups
    if "mrope_section" in getattr(config_class, "ignore_keys_at_rope_validation", ()):
        sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    if (features := getattr(like, "out_features", None)) is not None:
        sizes["out_features"] = features
    sizes |= SPECIAL_SIZES.get(config_class.model_type, {})
    parts = [name for name in getattr(config_class, "sub_configs", {}) if name not in sizes]
    defaults = config_class() if parts else None
    for name in parts:
        part = getattr(defaults, name, None)
        if isinstance(part, PreTrainedConfig):
            sizes[name] = small_config(type(part), part)
    config = config_class(**sizes)
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    if config.is_encoder_decoder and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0
    return config


def _small(name: str, default: Any) -> Any:
    """Return the small value of a field; None to leave it as it is."""
    if isinstance(default, (list, tuple)) and default and all(type(size) is int for size in default):
        if name in ("depths", "num_heads", "num_attention_heads"):
            return [2] * len(default)
        if name in _LISTS:
            return [_LISTS[name]] * len(default)
        if re.fullmatch(
            r"(\w*hidden_sizes|embed_dims?|neck_hidden_sizes|widths|channels|dims|encoder_hidden_sizes)", name
        ):
            return [32 * (1 + place) for place in range(len(default))]
        return None
    if default is None:
        return _MISSING.get(name)
    if type(default) is not int:
        return None
    small = next((value for pattern, value in _RULES if re.fullmatch(pattern, name)), None)
    if small is None or ("token_i" in name and default < VOCABULARY):
        return None
    return small if "token_i" in name else min(small, default)
