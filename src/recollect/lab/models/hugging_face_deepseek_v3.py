"""DeepSeek-V3 in Hugging Face's words: its configuration, and where its weights stand.

Checkpoints hold every expert's matrices on their own; models of transformers 5 hold them stacked. Both are read, the first is
written. The layers of multi-token prediction stand behind the last layer of the decoder, as `model.layers.61` in the released
weights, each with the embedding and the output matrix once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from recollect.errors import UnsupportedModelError
from recollect.lab.models.architectures import deepseek_v3_config
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.hugging_face_fields import DECODER_FIELDS, checked_fields, rotary_base_of, same_fields, wanted
from recollect.lab.models.hugging_face_parts import decoder_rules, gated_mlp_rules
from recollect.lab.models.weight_rules import Layout, WeightRule, rename

__all__ = ["deepseek_v3_from_hugging_face", "deepseek_v3_rules", "deepseek_v3_to_hugging_face"]

# Ours, and theirs where it means the same.
_SAME = {
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
}
# DeepseekV3Config's, where a file leaves a field out.
_DEFAULTS = {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "num_attention_heads": 128,
    "vocab_size": 129_280,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
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
}
# What a DeepSeek-V3 of ours cannot be told. Their norms of latent vectors have this epsilon, whatever the field says.
_FIXED = {"hidden_act": "silu", "attention_bias": False, "norm_topk_prob": True, "rms_norm_eps": 1e-6}


def deepseek_v3_from_hugging_face(fields: Mapping[str, Any]) -> TransformerConfig:
    """Read a `config.json`.

    Args:
        fields: its content.

    Returns:
        Our configuration.

    Raises:
        UnsupportedModelError: a field asks for something that no model of ours does.

    Example:
        >>> config = deepseek_v3_from_hugging_face({"num_hidden_layers": 4, "first_k_dense_replace": 1})
        >>> config.moe_layer_freq, config.mtp_num_layers
        ((0, 1, 1, 1), 1)
    """
    wanted(fields, _FIXED)
    ours = same_fields(fields, _SAME, _DEFAULTS)
    layers, dense = ours["num_layers"], min(fields.get("first_k_dense_replace", 3), ours["num_layers"])
    if ours["moe_router_topk"] // ours["moe_router_group_topk"] != 2:
        raise UnsupportedModelError(
            f"config.json: num_experts_per_tok is {ours['moe_router_topk']} and topk_group {ours['moe_router_group_topk']}, "
            "expected twice as many experts as groups: Hugging Face's DeepSeek-V3 chooses groups by their two best experts, "
            "DeepSeek-V3 and the reference model by as many as a group has to give."
        )
    shared = fields.get("n_shared_experts", 1)
    heads = fields.get("num_key_value_heads", ours["num_attention_heads"]) or ours["num_attention_heads"]
    wanted({"num_key_value_heads": heads}, {"num_key_value_heads": ours["num_attention_heads"]})
    further = fields.get("num_nextn_predict_layers", fields.get("num_mtp_layers", 1))
    return deepseek_v3_config(
        **ours,
        rotary_base=rotary_base_of(fields, default=1e4),
        moe_layer_freq=[0] * dense + [1] * (layers - dense),
        moe_shared_expert_intermediate_size=shared * ours["moe_ffn_hidden_size"] or None,
        mtp_num_layers=further or None,
    )


def deepseek_v3_to_hugging_face(config: TransformerConfig) -> dict[str, Any]:
    """Write the content of a `config.json`.

    Args:
        config: a DeepSeek-V3.

    Returns:
        The fields of `DeepseekV3Config`.

    Raises:
        UnsupportedModelError: their DeepSeek-V3 cannot be this model.

    Example:
        >>> from recollect.lab.models.sizes import NAMED_CONFIGS
        >>> deepseek_v3_to_hugging_face(NAMED_CONFIGS["deepseek-v3-671b"])["first_k_dense_replace"]
        3
    """
    sparse = [config.is_moe_layer(layer) for layer in range(config.num_layers)]
    others = {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_key_value_heads": config.num_attention_heads,
        "rope_theta": config.rotary_base,
        "first_k_dense_replace": sparse.index(True) if True in sparse else config.num_layers,
        "n_shared_experts": (config.moe_shared_expert_intermediate_size or 0) // config.moe_ffn_hidden_size,
        "num_nextn_predict_layers": config.mtp_num_layers or 0,
        **_FIXED,
    }
    return checked_fields(config, _SAME, others, read=deepseek_v3_from_hugging_face, architecture="DeepSeek-V3")


def deepseek_v3_rules(config: TransformerConfig) -> Iterator[WeightRule]:
    """Yield a rule for each tensor of a DeepSeek-V3.

    Args:
        config: its dimensions.

    Yields:
        Rules, in the order of the layers; those of multi-token prediction last.

    Example:
        >>> from recollect.lab.models.sizes import NAMED_CONFIGS
        >>> list(deepseek_v3_rules(NAMED_CONFIGS["deepseek-v3-671b"]))[-1].layouts[0].parts[0]
        'model.layers.61.shared_head.head.weight'
    """
    embedding, output = "embedding.word_embeddings.weight", "output_layer.weight"
    layers = (_layer(config, n, f"decoder.layers.{n}") for n in range(config.num_layers))
    yield from decoder_rules(config, chain.from_iterable(layers))
    for depth in range(config.mtp_num_layers or 0):
        ours, theirs = f"mtp.layers.{depth}", f"model.layers.{config.num_layers + depth}"
        for name in ("enorm", "hnorm", "eh_proj"):
            yield rename(f"{ours}.{name}.weight", f"{theirs}.{name}.weight")
        yield from _layer(config, config.num_layers + depth, f"{ours}.transformer_layer")
        yield rename(f"{ours}.final_layernorm.weight", f"{theirs}.shared_head.norm.weight")
        yield rename(embedding, f"{theirs}.embed_tokens.weight", is_extra=True)
        yield rename(output, f"{theirs}.shared_head.head.weight", is_extra=True)


def _layer(config: TransformerConfig, layer: int, ours: str) -> Iterator[WeightRule]:
    theirs = f"model.layers.{layer}"
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
    if config.is_moe_layer(layer):
        yield from _experts(config, f"{ours}.mlp", f"{theirs}.mlp")
    else:
        yield from gated_mlp_rules(config, f"{ours}.mlp", f"{theirs}.mlp", config.ffn_hidden_size)


def _experts(config: TransformerConfig, ours: str, theirs: str) -> Iterator[WeightRule]:
    experts, width = config.num_moe_experts or 0, config.moe_ffn_hidden_size
    yield rename(f"{ours}.router.weight", f"{theirs}.gate.weight")
    yield rename(f"{ours}.router.expert_bias", f"{theirs}.gate.e_score_correction_bias")
    one = f"{theirs}.experts.{{}}"
    separate = Layout((f"{one}.gate_proj.weight", f"{one}.up_proj.weight"), experts)
    stacked = Layout((f"{theirs}.experts.gate_up_proj",))
    yield WeightRule(f"{ours}.experts.linear_fc1.weight", (separate, stacked), (width, width))
    separate, stacked = Layout((f"{one}.down_proj.weight",), experts), Layout((f"{theirs}.experts.down_proj",))
    yield WeightRule(f"{ours}.experts.linear_fc2.weight", (separate, stacked))
    if config.moe_shared_expert_intermediate_size is not None:
        yield from gated_mlp_rules(
            config, f"{ours}.shared_experts", f"{theirs}.shared_experts", config.moe_shared_expert_intermediate_size
        )
