"""GPT-2, Llama, Mixtral and DeepSeek-V3 as Hugging Face stores them: the fields of `config.json`, and the names of weights.

GPT-2's matrices are stored transposed. Checkpoints of the whole model say `transformer.h.0`; those released with GPT-2, which
lack the LM head, say `h.0`. Both are read, the first is written.

Mixtral's auxiliary loss is counted differently and is off by default, so its coefficient is written but never read.

In DeepSeek-V3 the layers of multi-token prediction follow the last layer of the decoder, as `model.layers.61` in the released
weights, each with a second copy of the embedding and the LM head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from recollect.errors import UnsupportedModelError
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.hugging_face_architecture import Architecture, Layout, WeightRule, rename, require
from recollect.lab.models.sizes import NAMED_CONFIGS

_WORDS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu", "silu": "silu"}

_GPT2_LAYER = {
    "input_layernorm": "ln_1",
    "self_attention.linear_qkv": "attn.c_attn",
    "self_attention.linear_proj": "attn.c_proj",
    "pre_mlp_layernorm": "ln_2",
    "mlp.linear_fc1": "mlp.c_fc",
    "mlp.linear_fc2": "mlp.c_proj",
}


def _gpt2_rules(config: TransformerConfig) -> Iterator[WeightRule]:
    yield _gpt2_rule("embedding.word_embeddings.weight", "wte.weight")
    yield _gpt2_rule("embedding.position_embeddings.weight", "wpe.weight")
    for layer in range(config.num_layers):
        for name, their_name in _GPT2_LAYER.items():
            ours, theirs = f"decoder.layers.{layer}.{name}", f"h.{layer}.{their_name}"
            yield _gpt2_rule(f"{ours}.weight", f"{theirs}.weight", is_transposed="linear" in name)
            yield _gpt2_rule(f"{ours}.bias", f"{theirs}.bias")
    yield _gpt2_rule("decoder.final_layernorm.weight", "ln_f.weight")
    yield _gpt2_rule("decoder.final_layernorm.bias", "ln_f.bias")
    if not config.share_embeddings_and_output_weights:
        yield rename("output_layer.weight", "lm_head.weight")


def _gpt2_rule(ours: str, theirs: str, *, is_transposed: bool = False) -> WeightRule:
    names = (f"transformer.{theirs}", theirs)
    return WeightRule(ours, tuple(Layout((name,), is_transposed=is_transposed) for name in names))


GPT2 = Architecture(
    name="GPT-2",
    model_type="gpt2",
    class_name="GPT2LMHeadModel",
    default=NAMED_CONFIGS["gpt2"],
    rules=_gpt2_rules,
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
# Those that Llama and Mixtral share beside.
_LLAMA_FIELDS = {**_FIELDS, "num_query_groups": "num_key_value_heads", "kv_channels": "head_dim"}

# Yields the rules of one layer, given the model, the layer's number there and its path here.
LayerRules = Callable[[TransformerConfig, int, str], Iterator[WeightRule]]


def decoder_rules(config: TransformerConfig, layer_rules: LayerRules) -> Iterator[WeightRule]:
    """Yield the rules of a decoder without learned positions.

    Example:
        >>> from recollect.lab.models.sizes import NAMED_CONFIGS
        >>> [rule.ours for rule in decoder_rules(NAMED_CONFIGS["7b"], attention_rules)][-1]
        'output_layer.weight'
    """
    yield rename("embedding.word_embeddings.weight", "model.embed_tokens.weight")
    for layer in range(config.num_layers):
        yield from layer_rules(config, layer, f"decoder.layers.{layer}")
    yield rename("decoder.final_layernorm.weight", "model.norm.weight")
    if not config.share_embeddings_and_output_weights:
        yield rename("output_layer.weight", "lm_head.weight")


def attention_rules(config: TransformerConfig, number: int, ours: str) -> Iterator[WeightRule]:
    """Yield the rules of a layer's attention and of its two norms, given the layer's number there and its path here.

    Example:
        >>> from recollect.lab.models.sizes import NAMED_CONFIGS
        >>> len(list(attention_rules(NAMED_CONFIGS["7b"], 0, "decoder.layers.0")))
        4
    """
    theirs = f"model.layers.{number}"
    group = config.num_query_groups * config.kv_channels
    rows = (config.num_attention_heads * config.kv_channels, group, group)
    yield rename(f"{ours}.input_layernorm.weight", f"{theirs}.input_layernorm.weight")
    for kind in _kinds(config):
        qkv = Layout(tuple(f"{theirs}.self_attn.{name}_proj.{kind}" for name in "qkv"))
        yield WeightRule(f"{ours}.self_attention.linear_qkv.{kind}", (qkv,), rows)
        yield rename(f"{ours}.self_attention.linear_proj.{kind}", f"{theirs}.self_attn.o_proj.{kind}")
    yield rename(f"{ours}.pre_mlp_layernorm.weight", f"{theirs}.post_attention_layernorm.weight")


def gated_mlp_rules(config: TransformerConfig, ours: str, theirs: str, width: int) -> Iterator[WeightRule]:
    """Yield the rules of a gated MLP, given its path here and there and its inner width.

    Example:
        >>> from recollect.lab.models.sizes import NAMED_CONFIGS
        >>> [rule.ours for rule in gated_mlp_rules(NAMED_CONFIGS["7b"], "a", "b", 11_008)]
        ['a.linear_fc1.weight', 'a.linear_fc2.weight']
    """
    for kind in _kinds(config):
        gate_and_up = Layout((f"{theirs}.gate_proj.{kind}", f"{theirs}.up_proj.{kind}"))
        yield WeightRule(f"{ours}.linear_fc1.{kind}", (gate_and_up,), (width, width))
        yield rename(f"{ours}.linear_fc2.{kind}", f"{theirs}.down_proj.{kind}")


def expert_rules(
    config: TransformerConfig, ours: str, separate: str, stacked: str, names: tuple[str, str, str]
) -> Iterator[WeightRule]:
    """Yield the rules of routed experts.

    Checkpoints hold each expert's matrices separately, models of transformers 5 hold them stacked. Both are read, the first is
    written.

    Args:
        config: the model.
        ours: path of the MLP here.
        separate: path of the MLP in checkpoints.
        stacked: path of the MLP in models of transformers 5.
        names: gate, up and down projection of one expert in checkpoints.

    Example:
        >>> from recollect.lab.models.sizes import NAMED_CONFIGS
        >>> rules = expert_rules(NAMED_CONFIGS["mixtral-tiny"], "mlp", "moe", "mlp", ("w1", "w3", "w2"))
        >>> next(rules).layouts[0].names()[2]
        ['moe.experts.2.w1.weight', 'moe.experts.2.w3.weight']
    """
    experts, width = config.num_moe_experts or 0, config.moe_ffn_hidden_size
    gate, up, down = (f"{separate}.experts.{{}}.{name}.weight" for name in names)
    fc1 = (Layout((gate, up), experts), Layout((f"{stacked}.experts.gate_up_proj",)))
    fc2 = (Layout((down,), experts), Layout((f"{stacked}.experts.down_proj",)))
    yield WeightRule(f"{ours}.experts.linear_fc1.weight", fc1, (width, width))
    yield WeightRule(f"{ours}.experts.linear_fc2.weight", fc2)


def _kinds(config: TransformerConfig) -> tuple[str, ...]:
    return ("weight", "bias") if config.add_bias_linear else ("weight",)


def _llama_layer(config: TransformerConfig, number: int, ours: str) -> Iterator[WeightRule]:
    yield from attention_rules(config, number, ours)
    yield from gated_mlp_rules(config, f"{ours}.mlp", f"model.layers.{number}.mlp", config.ffn_hidden_size)


LLAMA = Architecture(
    name="Llama",
    model_type="llama",
    class_name="LlamaForCausalLM",
    default=NAMED_CONFIGS["7b"].changed(num_query_groups=0, max_position_embeddings=2048, layernorm_epsilon=1e-6),
    rules=lambda config: decoder_rules(config, _llama_layer),
    same={**_LLAMA_FIELDS, "add_bias_linear": "mlp_bias"},
    fixed={"sliding_window": None},
    repeated={"attention_bias": "add_bias_linear"},  # our biases are everywhere or nowhere
    activation="hidden_act",
    words=_WORDS,
    # Rotary frequencies, which old versions of transformers stored with the weights.
    ignored=r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
)


def _mixtral_layer(config: TransformerConfig, number: int, ours: str) -> Iterator[WeightRule]:
    yield from attention_rules(config, number, ours)
    separate, stacked = f"model.layers.{number}.block_sparse_moe", f"model.layers.{number}.mlp"
    yield rename(f"{ours}.mlp.router.weight", f"{separate}.gate.weight", f"{stacked}.gate.weight")
    yield from expert_rules(config, f"{ours}.mlp", separate, stacked, ("w1", "w3", "w2"))


MIXTRAL = Architecture(
    name="Mixtral",
    model_type="mixtral",
    class_name="MixtralForCausalLM",
    default=NAMED_CONFIGS["mixtral-8x7b"].changed(max_position_embeddings=131_072),
    rules=lambda config: decoder_rules(config, _mixtral_layer),
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


def _deepseek_rules(config: TransformerConfig) -> Iterator[WeightRule]:
    embedding, output = "embedding.word_embeddings.weight", "output_layer.weight"
    yield from decoder_rules(config, _deepseek_layer)
    for depth in range(config.mtp_num_layers or 0):
        number = config.num_layers + depth
        ours, theirs = f"mtp.layers.{depth}", f"model.layers.{number}"
        for name in ("enorm", "hnorm", "eh_proj"):
            yield rename(f"{ours}.{name}.weight", f"{theirs}.{name}.weight")
        yield from _deepseek_layer(config, number, f"{ours}.transformer_layer")
        yield rename(f"{ours}.final_layernorm.weight", f"{theirs}.shared_head.norm.weight")
        yield rename(embedding, f"{theirs}.embed_tokens.weight", is_extra=True)
        yield rename(output, f"{theirs}.shared_head.head.weight", is_extra=True)


def _deepseek_layer(config: TransformerConfig, number: int, ours: str) -> Iterator[WeightRule]:
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
    default=NAMED_CONFIGS["deepseek-v3-671b"],
    rules=_deepseek_rules,
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

ARCHITECTURES = {architecture.model_type: architecture for architecture in (GPT2, LLAMA, MIXTRAL, DEEPSEEK_V3)}
