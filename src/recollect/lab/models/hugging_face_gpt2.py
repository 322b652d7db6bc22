"""GPT-2 as Hugging Face stores it: the fields of its `config.json` and the names of its weights.

Its matrices are stored transposed. Checkpoints of the whole model say `transformer.h.0`; those released with GPT-2, which lack
the LM head, say `h.0`. Both are read, the first is written.
"""

from __future__ import annotations

from collections.abc import Iterator

from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.hugging_face_architecture import Architecture, Layout, WeightRule, rename
from recollect.lab.models.sizes import NAMED_CONFIGS

_LAYER = {
    "input_layernorm": "ln_1",
    "self_attention.linear_qkv": "attn.c_attn",
    "self_attention.linear_proj": "attn.c_proj",
    "pre_mlp_layernorm": "ln_2",
    "mlp.linear_fc1": "mlp.c_fc",
    "mlp.linear_fc2": "mlp.c_proj",
}


def _rules(config: TransformerConfig) -> Iterator[WeightRule]:
    yield _rule("embedding.word_embeddings.weight", "wte.weight")
    yield _rule("embedding.position_embeddings.weight", "wpe.weight")
    for layer in range(config.num_layers):
        for name, their_name in _LAYER.items():
            ours, theirs = f"decoder.layers.{layer}.{name}", f"h.{layer}.{their_name}"
            yield _rule(f"{ours}.weight", f"{theirs}.weight", is_transposed="linear" in name)
            yield _rule(f"{ours}.bias", f"{theirs}.bias")
    yield _rule("decoder.final_layernorm.weight", "ln_f.weight")
    yield _rule("decoder.final_layernorm.bias", "ln_f.bias")
    if not config.share_embeddings_and_output_weights:
        yield rename("output_layer.weight", "lm_head.weight")


def _rule(ours: str, theirs: str, *, is_transposed: bool = False) -> WeightRule:
    names = (f"transformer.{theirs}", theirs)
    return WeightRule(ours, tuple(Layout((name,), is_transposed=is_transposed) for name in names))


GPT2 = Architecture(
    name="GPT-2",
    model_type="gpt2",
    class_name="GPT2LMHeadModel",
    default=NAMED_CONFIGS["gpt2"],
    rules=_rules,
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
    words={
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu": "gelu",
        "relu": "relu",
        "silu": "silu",
        "swish": "silu",
    },
    # Masks, which old versions of transformers stored with the weights.
    ignored=r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",
)
