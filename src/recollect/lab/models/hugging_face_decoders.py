"""GPT-2, Llama, Qwen3, Mixtral and DeepSeek-V3 as Hugging Face stores them: the fields of `config.json`, and weights' names.

GPT-2's matrices are stored transposed. Checkpoints of the whole model say `transformer.h.0`; those released with GPT-2, which
lack the LM head, say `h.0`. Both are read, the first is written.

Mixtral's auxiliary loss is counted differently and is off by default, so its coefficient is written but never read.

In DeepSeek-V3 the layers of multi-token prediction follow the last layer of the decoder, as `model.layers.61` in the released
weights, each with a second copy of the embedding and the LM head.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from recollect.errors import UnsupportedModelError
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.hugging_face_architecture import Architecture, Weights, require
from recollect.lab.models.sizes import NAMED_CONFIGS

_WORDS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu", "silu": "silu"}

GPT2 = Architecture(
    name="GPT-2",
    model_type="gpt2",
    class_name="GPT2LMHeadModel",
    default=NAMED_CONFIGS["gpt2"],
    weights=lambda _config: {
        "embedding.word_embeddings": "wte",
        "embedding.position_embeddings": "wpe",
        "input_layernorm": "ln_1",
        "self_attention.linear_qkv": "attn.c_attn",
        "self_attention.linear_proj": "attn.c_proj",
        "pre_mlp_layernorm": "ln_2",
        "mlp.linear_fc1": "mlp.c_fc",
        "mlp.linear_fc2": "mlp.c_proj",
        "decoder.final_layernorm": "ln_f",
    },
    prefixes=("transformer.", ""),
    layers="h",
    is_transposed=True,
    same={
        "num_layers": "n_layer",
        "hidden_size": "n_embd",
        "ffn_hidden_size": "n_inner",
        "num_attention_heads": "n_head",
        "vocab_size": "vocab_size",
        "max_position_embeddings": "n_positions",
        "layernorm_epsilon": "layer_norm_epsilon",
        "attention_dropout": "attn_pdrop",
        "hidden_dropout": "resid_pdrop",
        "init_method_std": "initializer_range",
        "share_embeddings_and_output_weights": "tie_word_embeddings",
    },
    fixed={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
    },
    repeated={"embd_pdrop": "hidden_dropout"},
    activation="activation_function",
    words={"gelu_new": "gelu_tanh", **_WORDS, "swish": "silu"},
    # Masks, which old versions of transformers stored with the weights.
    ignored=r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",
)

# The fields that the other three share: their name by ours.
_FIELDS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "layernorm_epsilon": "rms_norm_eps",
    "attention_dropout": "attention_dropout",
    "init_method_std": "initializer_range",
    "share_embeddings_and_output_weights": "tie_word_embeddings",
}
# Further fields that Llama and Mixtral share.
_LLAMA_FIELDS = {**_FIELDS, "num_query_groups": "num_key_value_heads", "kv_channels": "head_dim"}

# The modules of all three, by ours.
_WEIGHTS: Weights = {
    "embedding.word_embeddings": "embed_tokens",
    "input_layernorm": "input_layernorm",
    "self_attention.linear_proj": "self_attn.o_proj",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": "mlp.down_proj",
    "decoder.final_layernorm": "norm",
}
_LLAMA_WEIGHTS: Weights = {
    **_WEIGHTS,
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
}
# Checkpoints hold each expert's matrices separately, models of transformers 5 hold them stacked.
_STACKED = {
    "mlp.experts.linear_fc1.weight": "mlp.experts.gate_up_proj",
    "mlp.experts.linear_fc2.weight": "mlp.experts.down_proj",
}

LLAMA = Architecture(
    name="Llama",
    model_type="llama",
    class_name="LlamaForCausalLM",
    default=NAMED_CONFIGS["7b"].changed(num_query_groups=0, max_position_embeddings=2048, layernorm_epsilon=1e-6),
    weights=lambda _config: _LLAMA_WEIGHTS,
    same={**_LLAMA_FIELDS, "add_bias_linear": "mlp_bias"},
    fixed={"sliding_window": None},
    repeated={"attention_bias": "add_bias_linear"},  # our biases are everywhere or nowhere
    activation="hidden_act",
    words=_WORDS,
    # Rotary frequencies, which old versions of transformers stored with the weights.
    ignored=r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
)

QWEN3 = replace(
    LLAMA,
    name="Qwen3",
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    default=LLAMA.default.changed(
        vocab_size=151_936, ffn_hidden_size=22_016, kv_channels=128, max_position_embeddings=32_768, qk_layernorm=True
    ),
    weights=lambda _config: {
        **_LLAMA_WEIGHTS,
        "self_attention.q_layernorm": "self_attn.q_norm",
        "self_attention.k_layernorm": "self_attn.k_norm",
    },
    same=_LLAMA_FIELDS,
    fixed={"attention_bias": False, "use_sliding_window": False},
    repeated={},
)

MIXTRAL = Architecture(
    name="Mixtral",
    model_type="mixtral",
    class_name="MixtralForCausalLM",
    default=NAMED_CONFIGS["mixtral-8x7b"].changed(max_position_embeddings=131_072),
    weights=lambda _config: {
        **_LLAMA_WEIGHTS,
        "mlp.router": "block_sparse_moe.gate",
        "mlp.experts.linear_fc1": ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        "mlp.experts.linear_fc2": "block_sparse_moe.experts.{}.w2",
    },
    also={**_STACKED, "mlp.router.weight": "mlp.gate.weight"},
    same={
        **_LLAMA_FIELDS,
        "num_moe_experts": "num_local_experts",
        "moe_router_topk": "num_experts_per_tok",
    },
    fixed={"hidden_act": "silu", "sliding_window": None, "router_jitter_noise": 0.0},
    write_more=lambda config: {"router_aux_loss_coef": config.moe_aux_loss_coeff},
)


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


DEEPSEEK_V3 = Architecture(
    name="DeepSeek-V3",
    model_type="deepseek_v3",
    class_name="DeepseekV3ForCausalLM",
    default=NAMED_CONFIGS["deepseek-v3-671b"],
    weights=lambda config: {
        **_WEIGHTS,
        "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
        "self_attention.q_layernorm": "self_attn.q_a_layernorm",
        "self_attention.qkv_up_proj.linear_q_up_proj": "self_attn.q_proj"
        if config.q_lora_rank is None
        else "self_attn.q_b_proj",
        "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
        "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
        "self_attention.qkv_up_proj.linear_kv_up_proj": "self_attn.kv_b_proj",
        "mlp.router": "mlp.gate",
        "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
        "mlp.experts.linear_fc1": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
        "mlp.experts.linear_fc2": "mlp.experts.{}.down_proj",
        "mlp.shared_experts.linear_fc1": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        "mlp.shared_experts.linear_fc2": "mlp.shared_experts.down_proj",
        # Of layers of multi-token prediction.
        **{name: name for name in ("enorm", "hnorm", "eh_proj")},
        "final_layernorm": "shared_head.norm",
    },
    also=_STACKED,
    copies={
        "embedding.word_embeddings.weight": "embed_tokens.weight",
        "output_layer.weight": "shared_head.head.weight",
    },
    same={
        **_FIELDS,
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
    # Their norms of latent vectors have this epsilon, whatever the field says.
    fixed={"hidden_act": "silu", "attention_bias": False, "norm_topk_prob": True, "rms_norm_eps": 1e-6},
    read_more=_read_more,
    write_more=_write_more,
)

ARCHITECTURES = {architecture.model_type: architecture for architecture in (GPT2, LLAMA, QWEN3, MIXTRAL, DEEPSEEK_V3)}
