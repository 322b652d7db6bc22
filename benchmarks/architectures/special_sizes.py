"""Sizes that no general rule finds, by the model type: fields that have to go together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["SPECIAL_SIZES"]

SPECIAL_SIZES: Mapping[str, Mapping[str, Any]] = {
    "bailing_hybrid": {"num_hidden_layers": 4, "layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1]},
    "beit": {"num_hidden_layers": 4, "out_indices": [0, 1, 2, 3]},
    "bit": {"num_groups": 4},
    "data2vec-vision": {"num_hidden_layers": 4, "out_indices": [0, 1, 2, 3]},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
    "donut-swin": {"image_size": 64, "window_size": 2},
    "esm": {"pad_token_id": 1, "mask_token_id": 2},
    "esmc": {"num_key_value_heads": 4},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_unified_assistant": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "kimi_linear": {"num_hidden_layers": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "luke": {"entity_vocab_size": 64, "entity_emb_size": 32},
    "mamba2": {"num_heads": 8},
    "mobilevitv2": {"image_size": 64},
    "qwen3_5_moe_text": {"num_hidden_layers": 4},
    "qwen3_5_text": {"num_hidden_layers": 4},
    "qwen3_next": {"num_hidden_layers": 4},
    "qwen4_exp_text": {"num_hidden_layers": 4},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 48], "axial_pos_shape": [6, 8]},
    "swin": {"image_size": 64, "window_size": 2},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "hybrid", "mamba", "hybrid"],
        "hybrid_layer_ids": [1, 3],
    },
}
