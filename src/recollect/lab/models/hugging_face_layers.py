"""Weight rules for the layers that several of Hugging Face's architectures share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.weight_rules import Layout, WeightRule, rename

__all__ = ["attention_rules", "decoder_rules", "expert_rules", "gated_mlp_rules"]

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
