"""Check the fields of a transformer configuration, and say what to change. Imports no torch."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin, get_type_hints

from recollect.lab.models.config_fields import TransformerFields

__all__ = ["check"]

_COUNTS = (
    *("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "num_query_groups", "kv_channels"),
    *("ffn_hidden_size", "max_position_embeddings", "moe_ffn_hidden_size", "moe_router_topk"),
    *("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
)
_COUNTS_OR_NONE = (
    *("num_moe_experts", "moe_router_num_groups", "moe_router_group_topk", "moe_shared_expert_intermediate_size"),
    *("q_lora_rank", "mtp_num_layers"),
)
_NOT_NEGATIVE = ("init_method_std", "moe_router_bias_update_rate", "moe_aux_loss_coeff", "mtp_loss_scaling_factor")
_POSITIVE = ("rotary_base", "layernorm_epsilon")


def check(config: TransformerFields, *, has_own_kv_channels: bool) -> None:
    """Check that a model can be built from a configuration.

    Args:
        config: the configuration, with derived fields filled in.
        has_own_kv_channels: whether `kv_channels` was given, not derived.

    Raises:
        ValueError: names the field, its value, the values allowed and what to change.
    """
    _check_ranges(config)
    if config.hidden_size % config.num_attention_heads and not has_own_kv_channels:
        expected = f"a multiple of num_attention_heads = {config.num_attention_heads}, or kv_channels set"
        _refuse("hidden_size", config.hidden_size, expected)
    _check_attention(config)
    _check_experts(config)


def _choices(config_type: type[TransformerFields]) -> dict[str, tuple[str, ...]]:
    hints = get_type_hints(config_type)
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}


def _refuse(name: str, got: Any, expected: str) -> None:
    raise ValueError(f"TransformerConfig.{name}: got {got!r}, expected {expected}.")


def _check_ranges(config: TransformerFields) -> None:
    for name, choices in _choices(type(config)).items():
        if getattr(config, name) not in choices:
            _refuse(name, getattr(config, name), f"one of {', '.join(choices)}")
    for name in (*_COUNTS, *_COUNTS_OR_NONE):
        value = getattr(config, name)
        if value is None and name in _COUNTS_OR_NONE:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            _refuse(name, value, "a whole number")
        if value < 1:
            _refuse(name, value, "at least 1" + (", or None for none" if name in _COUNTS_OR_NONE else ""))
    for name in _NOT_NEGATIVE:
        if not getattr(config, name) >= 0:
            _refuse(name, getattr(config, name), "at least 0")
    for name in _POSITIVE:
        if not getattr(config, name) > 0:
            _refuse(name, getattr(config, name), "more than 0")
    for name in ("hidden_dropout", "attention_dropout"):
        if not 0 <= getattr(config, name) < 1:
            _refuse(name, getattr(config, name), "a probability from 0 up to, but not including, 1")


def _check_attention(config: TransformerFields) -> None:
    heads = config.num_attention_heads
    if heads % config.num_query_groups:
        _refuse("num_query_groups", config.num_query_groups, f"a divisor of num_attention_heads = {heads}")
    if config.multi_latent_attention:
        if config.num_query_groups != heads:
            expected = (
                f"num_attention_heads = {heads}, because with multi_latent_attention all heads share one latent vector"
            )
            _refuse("num_query_groups", config.num_query_groups, expected)
        if config.qk_pos_emb_head_dim % 2:
            _refuse("qk_pos_emb_head_dim", config.qk_pos_emb_head_dim, "an even number: rotary positions rotate pairs")
    elif config.position_embedding_type == "rope" and config.kv_channels % 2:
        expected = "an even number, because rotary positions rotate pairs of channels (it is hidden_size / num_attention_heads)"
        _refuse("kv_channels", config.kv_channels, expected)


def _check_experts(config: TransformerFields) -> None:
    experts = config.num_moe_experts
    if experts is None:
        for name in ("moe_shared_expert_intermediate_size", "moe_router_num_groups", "moe_router_group_topk"):
            if getattr(config, name) is not None:
                _refuse(name, getattr(config, name), "None if num_moe_experts is None; set num_moe_experts too")
        return
    if config.moe_router_topk > experts:
        _refuse("moe_router_topk", config.moe_router_topk, f"at most num_moe_experts = {experts}")
    if config.moe_router_enable_expert_bias and config.moe_router_score_function != "sigmoid":
        _refuse("moe_router_enable_expert_bias", True, "False, or moe_router_score_function 'sigmoid'")
    if config.moe_router_dtype not in (None, "fp32"):
        _refuse("moe_router_dtype", config.moe_router_dtype, "'fp32', or None for the dtype of the model")
    _check_layer_pattern(config)
    _check_groups(config, experts)
    for name in ("hidden_size", "moe_ffn_hidden_size"):
        if config.moe_grouped_gemm and getattr(config, name) % 8:
            expected = "a multiple of 8, because grouped products read 16 bytes at once, or moe_grouped_gemm False"
            _refuse(name, getattr(config, name), expected)


def _check_layer_pattern(config: TransformerFields) -> None:
    pattern = config.moe_layer_freq
    if isinstance(pattern, int):
        if pattern < 1:
            _refuse("moe_layer_freq", pattern, "at least 1, or a 1 or 0 for each layer")
        return
    if len(pattern) != config.num_layers:
        _refuse("moe_layer_freq", pattern, f"an entry for each of num_layers = {config.num_layers} layers")
    if any(entry not in (0, 1) for entry in pattern):
        _refuse("moe_layer_freq", pattern, "1 (experts) or 0 (dense) for each layer")


def _check_groups(config: TransformerFields, experts: int) -> None:
    groups, chosen = config.moe_router_num_groups, config.moe_router_group_topk
    if groups is None and chosen is None:
        return
    if groups is None or chosen is None:
        missing = "moe_router_num_groups" if groups is None else "moe_router_group_topk"
        _refuse(missing, None, "a number: moe_router_num_groups and moe_router_group_topk only work together")
        return
    if experts % groups:
        _refuse("moe_router_num_groups", groups, f"a divisor of num_moe_experts = {experts}")
    if chosen > groups:
        _refuse("moe_router_group_topk", chosen, f"at most moe_router_num_groups = {groups}")
    reachable = chosen * (experts // groups)
    if config.moe_router_topk > reachable:
        expected = f"at most {reachable}, the experts in {chosen} of {groups} groups"
        _refuse("moe_router_topk", config.moe_router_topk, expected)
