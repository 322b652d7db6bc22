"""Where the weights of parts stand that several of Hugging Face's architectures have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.weight_rules import Layout, WeightRule, rename

__all__ = ["attention_rules", "decoder_rules", "gated_mlp_rules"]


def decoder_rules(config: TransformerConfig, layers: Iterable[WeightRule]) -> Iterator[WeightRule]:
    """Yield a rule for each tensor of a decoder without learned positions, those of its layers in the middle.

    Args:
        config: the model.
        layers: rules of the layers.

    Yields:
        Rules.

    Example:
        >>> from recollect.lab.models.sizes import NAMED_CONFIGS
        >>> [rule.ours for rule in decoder_rules(NAMED_CONFIGS["7b"], [])][-1]
        'output_layer.weight'
    """
    yield rename("embedding.word_embeddings.weight", "model.embed_tokens.weight")
    yield from layers
    yield rename("decoder.final_layernorm.weight", "model.norm.weight")
    if not config.share_embeddings_and_output_weights:
        yield rename("output_layer.weight", "lm_head.weight")


def attention_rules(config: TransformerConfig, ours: str, theirs: str) -> Iterator[WeightRule]:
    """Yield a rule for each tensor of a layer's attention, and of the norms before its two halves.

    Args:
        config: the model.
        ours: path of the layer here.
        theirs: path of the layer there.

    Yields:
        Rules.

    Example:
        >>> from recollect.lab.models.sizes import NAMED_CONFIGS
        >>> len(list(attention_rules(NAMED_CONFIGS["7b"], "decoder.layers.0", "model.layers.0")))
        4
    """
    group = config.num_query_groups * config.kv_channels
    rows = (config.num_attention_heads * config.kv_channels, group, group)
    yield rename(f"{ours}.input_layernorm.weight", f"{theirs}.input_layernorm.weight")
    for kind in _kinds(config):
        qkv = Layout(tuple(f"{theirs}.self_attn.{name}_proj.{kind}" for name in "qkv"))
        yield WeightRule(f"{ours}.self_attention.linear_qkv.{kind}", (qkv,), rows)
        yield rename(f"{ours}.self_attention.linear_proj.{kind}", f"{theirs}.self_attn.o_proj.{kind}")
    yield rename(f"{ours}.pre_mlp_layernorm.weight", f"{theirs}.post_attention_layernorm.weight")


def gated_mlp_rules(config: TransformerConfig, ours: str, theirs: str, width: int) -> Iterator[WeightRule]:
    """Yield a rule for each tensor of an MLP with a gate.

    Args:
        config: the model.
        ours: path of the MLP here.
        theirs: path of the MLP there.
        width: channels inside.

    Yields:
        Rules.

    Example:
        >>> from recollect.lab.models.sizes import NAMED_CONFIGS
        >>> [rule.ours for rule in gated_mlp_rules(NAMED_CONFIGS["7b"], "a", "b", 11_008)]
        ['a.linear_fc1.weight', 'a.linear_fc2.weight']
    """
    for kind in _kinds(config):
        gate_and_up = Layout((f"{theirs}.gate_proj.{kind}", f"{theirs}.up_proj.{kind}"))
        yield WeightRule(f"{ours}.linear_fc1.{kind}", (gate_and_up,), (width, width))
        yield rename(f"{ours}.linear_fc2.{kind}", f"{theirs}.down_proj.{kind}")


def _kinds(config: TransformerConfig) -> tuple[str, ...]:
    return ("weight", "bias") if config.add_bias_linear else ("weight",)
