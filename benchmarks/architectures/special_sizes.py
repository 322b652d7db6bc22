"""Sizes that no general rule finds, by the model type: fields that have to go together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["SPECIAL_SIZES"]

_RESNET = {
    "model_type": "resnet",
    "embedding_size": 16,
    "hidden_sizes": [16, 32, 48, 64],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
    "out_features": ["stage2", "stage3", "stage4"],
}
_LAST_OF_RESNET = {"backbone_config": {**_RESNET, "out_features": ["stage4"]}, "num_queries": 8}
_RT_DETR = {
    "backbone_config": {**_RESNET, "model_type": "rt_detr_resnet"},
    "encoder_in_channels": [32, 48, 64],
    "decoder_in_channels": [64, 64, 64],
    "num_queries": 8,
    "num_denoising": 4,
}
_GPT2_WITH_IMAGES = {
    "model_type": "gpt2",
    "vocab_size": 128,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "add_cross_attention": True,
    "is_decoder": True,
}
_VIT = {
    "model_type": "vit",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
}
_GRID = {"image_grid_pinpoints": [[64, 64]]}
_FORECAST = {"prediction_length": 24, "context_length": 32, "num_time_features": 2}
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
    # several kinds of input
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "blip-2": {"image_token_index": 120, "num_query_tokens": 8},
    "ernie4_5_vl_moe_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}
    },
    "glm4v_moe_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    "idefics3_vision": {"patch_size": 8},
    "instructblip": {"image_token_index": 120, "num_query_tokens": 8},
    "internvl_vision": {"image_size": [32, 32], "patch_size": [8, 8]},
    "janus_vqgan": {"base_channels": 32, "embed_dim": 8, "channel_multiplier": [1, 1]},
    "llama4_text": {"intermediate_size_mlp": 96},
    "llama4_vision_model": {
        "intermediate_size": 256,
        "projector_input_dim": 64,
        "projector_output_dim": 64,
        "vision_output_dim": 64,
        "patch_size": 8,
    },
    "llava_next": _GRID,
    "llava_next_video": _GRID,
    "llava_onevision": _GRID,
    "mllama_text_model": {"cross_attention_layers": [1]},
    "mllama_vision_model": {"intermediate_layers_indices": [0, 1], "vision_output_dim": 192, "num_global_layers": 1},
    "paddleocr_vl_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 3, "vision_end_token_id": 3},
    "qwen2_5_vl_vision": {"fullatt_block_indexes": [1]},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 3, "vision_end_token_id": 3},
    "qwen3_vl_vision": {"deepstack_visual_indexes": [0, 1, 2]},
    "smolvlm_vision": {"patch_size": 8},
    "vipllava": {"vision_feature_layers": [-2, -3, -1, 1, 0]},
    "vision-encoder-decoder": {"encoder": {**_VIT, "image_size": 32}, "decoder": _GPT2_WITH_IMAGES},
    # boxes and masks
    "conditional_detr": _LAST_OF_RESNET,
    "d_fine": _RT_DETR,
    "dab-detr": _LAST_OF_RESNET,
    "deformable_detr": {"backbone_config": _RESNET, "num_queries": 8},
    "detr": _LAST_OF_RESNET,
    "grounding-dino": {"num_queries": 8},
    "lw_detr": {"num_queries": 8},
    "mask2former": {"feature_size": 64, "mask_feature_size": 64, "num_queries": 8},
    "mm-grounding-dino": {"num_queries": 8},
    "rt_detr": _RT_DETR,
    "rt_detr_v2": _RT_DETR,
    "oneformer": {"num_queries": 8, "text_encoder_n_ctx": 4, "text_encoder_context_length": 77},
    "sam_hq_mask_decoder": {"vit_dim": 64},
    "sam_hq_prompt_encoder": {"image_size": 64},
    "sam_hq_vision_model": {"output_channels": 64, "image_size": 64, "num_pos_feats": 32},
    "sam_vision_model": {"output_channels": 64, "image_size": 64, "num_pos_feats": 32},
    "sam_prompt_encoder": {"image_size": 64},
    "table-transformer": _LAST_OF_RESNET,
    "yolos": {"image_size": [32, 32]},
    # the rest
    "autoformer": _FORECAST,
    "informer": _FORECAST,
    "layoutlmv3": {"coordinate_size": 8, "shape_size": 16},
    "time_series_transformer": _FORECAST,
    "timesfm": {"context_length": 64, "horizon_length": 24},
    "timesfm2_5": {"context_length": 64, "horizon_length": 24},
    "vilt": {"max_position_embeddings": 64},
    "vits": {"upsample_initial_channel": 64, "spectrogram_bins": 65},
}
