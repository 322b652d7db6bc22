"""GPT-2 in Hugging Face's words: its configuration, and where its weights stand.

Its matrices are stored with their columns as outputs. Checkpoints of the whole model say `transformer.h.0`, those released
with GPT-2, of the model without its head, `h.0`. Both are read, the first is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from recollect.lab.models.architectures import gpt_config
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.hugging_face_fields import checked_fields, meaning, same_fields, wanted
from recollect.lab.models.weight_rules import Layout, WeightRule, rename

__all__ = ["GPT2_IGNORED", "gpt2_from_hugging_face", "gpt2_rules", "gpt2_to_hugging_face"]

# Masks, which old versions of transformers stored with the weights.
GPT2_IGNORED = r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)"

# Ours, and theirs where it means the same.
_SAME = {
    "num_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "n_positions",
    "layernorm_epsilon": "layer_norm_epsilon",
    "attention_dropout": "attn_pdrop",
    "hidden_dropout": "resid_pdrop",
    "init_method_std": "initializer_range",
    "share_embeddings_and_output_weights": "tie_word_embeddings",
}
_ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu", "silu": "silu"}
# Their other words, and ours.
_SYNONYMS = {"gelu_pytorch_tanh": "gelu_tanh", "swish": "silu"}
# What a GPT of ours cannot be told.
_FIXED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
}
# GPT2Config's, where a file leaves a field out.
_DEFAULTS = {
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "vocab_size": 50_257,
    "n_positions": 1024,
    "layer_norm_epsilon": 1e-5,
    "attn_pdrop": 0.1,
    "resid_pdrop": 0.1,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
}


def gpt2_from_hugging_face(fields: Mapping[str, Any]) -> TransformerConfig:
    """Read a `config.json`.

    Args:
        fields: its content.

    Returns:
        Our configuration.

    Raises:
        UnsupportedModelError: a field asks for something that no model of ours does.

    Example:
        >>> gpt2_from_hugging_face({"n_layer": 2}).activation_func
        'gelu_tanh'
    """
    ours = same_fields(fields, _SAME, _DEFAULTS)
    wanted(fields, {**_FIXED, "embd_pdrop": ours["hidden_dropout"]})
    by_theirs = {**_SYNONYMS, **{theirs: ours for ours, theirs in _ACTIVATIONS.items()}}
    activation = meaning("activation_function", fields.get("activation_function", "gelu_new"), by_theirs)
    return gpt_config(**ours, ffn_hidden_size=fields.get("n_inner") or 0, activation_func=activation)


def gpt2_to_hugging_face(config: TransformerConfig) -> dict[str, Any]:
    """Write the content of a `config.json`.

    Args:
        config: a GPT-2 or GPT-3.

    Returns:
        The fields of `GPT2Config`.

    Raises:
        UnsupportedModelError: their GPT-2 cannot be this model.

    Example:
        >>> from recollect.lab.models.sizes import NAMED_CONFIGS
        >>> gpt2_to_hugging_face(NAMED_CONFIGS["gpt2"])["n_embd"]
        768
    """
    others = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_inner": config.ffn_hidden_size,
        "activation_function": _ACTIVATIONS[config.activation_func],
        "embd_pdrop": config.hidden_dropout,
        **_FIXED,
    }
    return checked_fields(config, _SAME, others, read=gpt2_from_hugging_face, architecture="GPT-2")


def gpt2_rules(config: TransformerConfig) -> Iterator[WeightRule]:
    """Yield a rule for each tensor of a GPT-2.

    Args:
        config: its dimensions.

    Yields:
        Rules, in the order of the layers.

    Example:
        >>> from recollect.lab.models.sizes import NAMED_CONFIGS
        >>> [rule.ours for rule in gpt2_rules(NAMED_CONFIGS["gpt2"])][2]
        'decoder.layers.0.input_layernorm.weight'
    """
    yield _rule("embedding.word_embeddings.weight", "wte.weight")
    yield _rule("embedding.position_embeddings.weight", "wpe.weight")
    for layer in range(config.num_layers):
        for ours, theirs in {
            "input_layernorm": "ln_1",
            "self_attention.linear_qkv": "attn.c_attn",
            "self_attention.linear_proj": "attn.c_proj",
            "pre_mlp_layernorm": "ln_2",
            "mlp.linear_fc1": "mlp.c_fc",
            "mlp.linear_fc2": "mlp.c_proj",
        }.items():
            name, path = f"decoder.layers.{layer}.{ours}", f"h.{layer}.{theirs}"
            yield _rule(f"{name}.weight", f"{path}.weight", is_transposed="linear" in ours)
            yield _rule(f"{name}.bias", f"{path}.bias")
    yield _rule("decoder.final_layernorm.weight", "ln_f.weight")
    yield _rule("decoder.final_layernorm.bias", "ln_f.bias")
    if not config.share_embeddings_and_output_weights:
        yield rename("output_layer.weight", "lm_head.weight")


def _rule(ours: str, theirs: str, *, is_transposed: bool = False) -> WeightRule:
    names = (f"transformer.{theirs}", theirs)
    return WeightRule(ours, tuple(Layout((name,), is_transposed=is_transposed) for name in names))
