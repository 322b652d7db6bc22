"""Llama as Hugging Face stores it: the fields of its `config.json` and the names of its weights."""

from __future__ import annotations

from collections.abc import Iterator

from recollect.lab.models.architectures import llama_config
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.hugging_face_architecture import DECODER_DEFAULTS, DECODER_FIELDS, Architecture
from recollect.lab.models.hugging_face_layers import attention_rules, decoder_rules, gated_mlp_rules
from recollect.lab.models.weight_rules import WeightRule

__all__ = ["LLAMA"]


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
