"""Llama and Mixtral as Hugging Face stores them: the fields of their `config.json` and the names of their weights.

Mixtral's auxiliary loss is counted differently and is off by default, so its coefficient is written but never read.
"""

from __future__ import annotations

from collections.abc import Iterator

from recollect.lab.models.architectures import llama_config, mixtral_config
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.hugging_face_architecture import DECODER_DEFAULTS, DECODER_FIELDS, Architecture
from recollect.lab.models.hugging_face_layers import attention_rules, decoder_rules, expert_rules, gated_mlp_rules
from recollect.lab.models.weight_rules import WeightRule, rename

__all__ = ["LLAMA", "MIXTRAL"]


def _layer(config: TransformerConfig, number: int, ours: str) -> Iterator[WeightRule]:
    yield from attention_rules(config, number, ours)
    yield from gated_mlp_rules(config, f"{ours}.mlp", f"model.layers.{number}.mlp", config.ffn_hidden_size)


LLAMA = Architecture(
    name="Llama",
    model_type="llama",
    class_name="LlamaForCausalLM",
    build=llama_config,
    rules=lambda config: decoder_rules(config, _layer),
    same={
        **DECODER_FIELDS,
        "num_query_groups": "num_key_value_heads",
        "kv_channels": "head_dim",
        "add_bias_linear": "mlp_bias",
    },
    defaults={
        **DECODER_DEFAULTS,
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "head_dim": None,
        "vocab_size": 32_000,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "mlp_bias": False,
    },
    fixed={"sliding_window": None},
    repeated={"attention_bias": "add_bias_linear"},  # our biases are everywhere or nowhere
    activation=("hidden_act", "silu"),
    words={"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu", "silu": "silu"},
    rotary_base=1e4,
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
    build=mixtral_config,
    rules=lambda config: decoder_rules(config, _mixtral_layer),
    same={
        **DECODER_FIELDS,
        "num_query_groups": "num_key_value_heads",
        "kv_channels": "head_dim",
        "num_moe_experts": "num_local_experts",
        "moe_router_topk": "num_experts_per_tok",
    },
    defaults={
        **DECODER_DEFAULTS,
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": None,
        "vocab_size": 32_000,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    fixed={"hidden_act": "silu", "sliding_window": None, "router_jitter_noise": 0.0},
    rotary_base=1e6,
    write_more=lambda config: {"router_aux_loss_coef": config.moe_aux_loss_coeff},
)
