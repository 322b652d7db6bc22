"""DeepSeek-V3 as Hugging Face stores it: the fields of its `config.json` and the names of its weights.

The layers of multi-token prediction follow the last layer of the decoder, as `model.layers.61` in the released weights, each
with a second copy of the embedding and the LM head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from recollect.errors import UnsupportedModelError
from recollect.lab.models.architectures import deepseek_v3_config
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.hugging_face_architecture import DECODER_DEFAULTS, DECODER_FIELDS, Architecture, require
from recollect.lab.models.hugging_face_layers import decoder_rules, expert_rules, gated_mlp_rules
from recollect.lab.models.weight_rules import WeightRule, rename

__all__ = ["DEEPSEEK_V3"]


def _read_more(fields: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    layers, dense = ours["num_layers"], min(fields.get("first_k_dense_replace", 3), ours["num_layers"])
    if ours["moe_router_topk"] // ours["moe_router_group_topk"] != 2:
        raise UnsupportedModelError(
            f"config.json: num_experts_per_tok is {ours['moe_router_topk']} and topk_group {ours['moe_router_group_topk']}, "
            "expected twice as many experts as groups: Hugging Face's DeepSeek-V3 ranks groups by their two best experts, "
            "DeepSeek-V3 and the reference model by num_experts_per_tok / topk_group of them."
        )
    heads = ours["num_attention_heads"]
    require({"num_key_value_heads": fields.get("num_key_value_heads") or heads}, {"num_key_value_heads": heads})
    return {
        "moe_layer_freq": [0] * dense + [1] * (layers - dense),
        "moe_shared_expert_intermediate_size": fields.get("n_shared_experts", 1) * ours["moe_ffn_hidden_size"] or None,
        "mtp_num_layers": fields.get("num_nextn_predict_layers", fields.get("num_mtp_layers", 1)) or None,
    }


def _write_more(config: TransformerConfig) -> dict[str, Any]:
    sparse = [config.is_moe_layer(layer) for layer in range(config.num_layers)]
    return {
        "num_key_value_heads": config.num_attention_heads,
        "first_k_dense_replace": sparse.index(True) if True in sparse else config.num_layers,
        "n_shared_experts": (config.moe_shared_expert_intermediate_size or 0) // config.moe_ffn_hidden_size,
        "num_nextn_predict_layers": config.mtp_num_layers or 0,
    }


def _rules(config: TransformerConfig) -> Iterator[WeightRule]:
    embedding, output = "embedding.word_embeddings.weight", "output_layer.weight"
    yield from decoder_rules(config, _layer)
    for depth in range(config.mtp_num_layers or 0):
        number = config.num_layers + depth
        ours, theirs = f"mtp.layers.{depth}", f"model.layers.{number}"
        for name in ("enorm", "hnorm", "eh_proj"):
            yield rename(f"{ours}.{name}.weight", f"{theirs}.{name}.weight")
        yield from _layer(config, number, f"{ours}.transformer_layer")
        yield rename(f"{ours}.final_layernorm.weight", f"{theirs}.shared_head.norm.weight")
        yield rename(embedding, f"{theirs}.embed_tokens.weight", is_extra=True)
        yield rename(output, f"{theirs}.shared_head.head.weight", is_extra=True)


def _layer(config: TransformerConfig, number: int, ours: str) -> Iterator[WeightRule]:
    theirs = f"model.layers.{number}"
    names = {
        "input_layernorm": "input_layernorm",
        "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
        "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
        "self_attention.qkv_up_proj.linear_kv_up_proj": "self_attn.kv_b_proj",
        "self_attention.linear_proj": "self_attn.o_proj",
        "pre_mlp_layernorm": "post_attention_layernorm",
    }
    if config.q_lora_rank is None:
        names["self_attention.qkv_up_proj.linear_q_up_proj"] = "self_attn.q_proj"
    else:
        names["self_attention.linear_q_down_proj"] = "self_attn.q_a_proj"
        names["self_attention.q_layernorm"] = "self_attn.q_a_layernorm"
        names["self_attention.qkv_up_proj.linear_q_up_proj"] = "self_attn.q_b_proj"
    for name, their_name in names.items():
        yield rename(f"{ours}.{name}.weight", f"{theirs}.{their_name}.weight")
    mlp, their_mlp = f"{ours}.mlp", f"{theirs}.mlp"
    if not config.is_moe_layer(number):
        yield from gated_mlp_rules(config, mlp, their_mlp, config.ffn_hidden_size)
        return
    yield rename(f"{mlp}.router.weight", f"{their_mlp}.gate.weight")
    yield rename(f"{mlp}.router.expert_bias", f"{their_mlp}.gate.e_score_correction_bias")
    yield from expert_rules(config, mlp, their_mlp, their_mlp, ("gate_proj", "up_proj", "down_proj"))
    shared = config.moe_shared_expert_intermediate_size
    if shared is not None:
        yield from gated_mlp_rules(config, f"{mlp}.shared_experts", f"{their_mlp}.shared_experts", shared)


DEEPSEEK_V3 = Architecture(
    name="DeepSeek-V3",
    model_type="deepseek_v3",
    class_name="DeepseekV3ForCausalLM",
    build=deepseek_v3_config,
    rules=_rules,
    same={
        **DECODER_FIELDS,
        "rotary_interleaved": "rope_interleave",
        "q_lora_rank": "q_lora_rank",
        "kv_lora_rank": "kv_lora_rank",
        "qk_head_dim": "qk_nope_head_dim",
        "qk_pos_emb_head_dim": "qk_rope_head_dim",
        "v_head_dim": "v_head_dim",
        "num_moe_experts": "n_routed_experts",
        "moe_router_topk": "num_experts_per_tok",
        "moe_router_num_groups": "n_group",
        "moe_router_group_topk": "topk_group",
        "moe_router_topk_scaling_factor": "routed_scaling_factor",
        "moe_ffn_hidden_size": "moe_intermediate_size",
    },
    defaults={
        **DECODER_DEFAULTS,
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "num_attention_heads": 128,
        "vocab_size": 129_280,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_interleave": True,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "moe_intermediate_size": 2048,
    },
    # Their norms of latent vectors have this epsilon, whatever the field says.
    fixed={"hidden_act": "silu", "attention_bias": False, "norm_topk_prob": True, "rms_norm_eps": 1e-6},
    rotary_base=1e4,
    read_more=_read_more,
    write_more=_write_more,
)
