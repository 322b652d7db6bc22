"""Checks of a model's configuration, a `TransformerConfig`: single fields, and fields together. Imports no torch."""

from typing import Any, Literal, get_args, get_origin, get_type_hints

FP8_MULTIPLES = {"delayed": 16, "tensorwise": 16, "blockwise": 128, "mxfp8": 32}
"""Divisors of a product's dimensions: kernels read 16 bytes at once, and the others' blocks are this long."""

FP8_FIELDS = (
    *("fp8", "fp8_recipe", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_emulated"),
    *("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
)
"""`fp8`, and the fields with its details."""

_NOT_NEGATIVE = (
    *("init_method_std", "moe_router_bias_update_rate", "moe_aux_loss_coeff", "mtp_loss_scaling_factor"),
    *("fp8_margin", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
)


def refuse(config: Any, name: str, expected: str) -> None:
    raise ValueError(f"TransformerConfig.{name}: got {getattr(config, name)!r}, expected {expected}.")


def check_ranges(config: Any) -> None:
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if get_origin(hint) is Literal and value not in get_args(hint):
            refuse(config, name, f"one of {', '.join(get_args(hint))}")
        if hint is int or (hint == int | None and value is not None):
            if not isinstance(value, int) or isinstance(value, bool):
                refuse(config, name, "a whole number")
            if value < 1 and name not in _NOT_NEGATIVE:
                refuse(config, name, "at least 1" + ("" if hint is int else ", or None for none"))
        if name in _NOT_NEGATIVE and not value >= 0:
            refuse(config, name, "at least 0")
        if name in ("rotary_base", "layernorm_epsilon") and not value > 0:
            refuse(config, name, "more than 0")
        if name in ("hidden_dropout", "attention_dropout") and not 0 <= value < 1:
            refuse(config, name, "a probability from 0 up to, but not including, 1")


def check_attention(config: Any) -> None:
    heads = config.num_attention_heads
    if heads % config.num_query_groups:
        refuse(config, "num_query_groups", f"a divisor of num_attention_heads = {heads}")
    if config.multi_latent_attention:
        if config.num_query_groups != heads:
            why = "because with multi_latent_attention all heads share one latent vector"
            refuse(config, "num_query_groups", f"num_attention_heads = {heads}, {why}")
        if config.qk_pos_emb_head_dim % 2:
            refuse(config, "qk_pos_emb_head_dim", "an even number: rotary positions rotate pairs")
    elif config.position_embedding_type == "rope" and config.kv_channels % 2:
        why = "because rotary positions rotate pairs of channels (it is hidden_size / num_attention_heads)"
        refuse(config, "kv_channels", f"an even number, {why}")


def check_experts(config: Any) -> None:
    experts = config.num_moe_experts
    if experts is None:
        for name in ("moe_shared_expert_intermediate_size", "moe_router_num_groups", "moe_router_group_topk"):
            if getattr(config, name) is not None:
                refuse(config, name, "None if num_moe_experts is None; set num_moe_experts too")
        return
    if config.moe_router_topk > experts:
        refuse(config, "moe_router_topk", f"at most num_moe_experts = {experts}")
    if config.moe_router_enable_expert_bias and config.moe_router_score_function != "sigmoid":
        refuse(config, "moe_router_enable_expert_bias", "False, or moe_router_score_function 'sigmoid'")
    if config.moe_router_dtype not in (None, "fp32"):
        refuse(config, "moe_router_dtype", "'fp32', or None for the dtype of the model")
    _check_layer_pattern(config)
    _check_groups(config, experts)
    for name in ("hidden_size", "moe_ffn_hidden_size"):
        if config.moe_grouped_gemm and getattr(config, name) % 8:
            why = "because grouped products read 16 bytes at once"
            refuse(config, name, f"a multiple of 8, {why}, or moe_grouped_gemm False")


def _check_layer_pattern(config: Any) -> None:
    pattern = config.moe_layer_freq
    if isinstance(pattern, int):
        if pattern < 1:
            refuse(config, "moe_layer_freq", "at least 1, or a 1 or 0 for each layer")
    elif len(pattern) != config.num_layers:
        refuse(config, "moe_layer_freq", f"an entry for each of num_layers = {config.num_layers} layers")
    elif any(entry not in (0, 1) for entry in pattern):
        refuse(config, "moe_layer_freq", "1 (experts) or 0 (dense) for each layer")


def _check_groups(config: Any, experts: int) -> None:
    groups, chosen = config.moe_router_num_groups, config.moe_router_group_topk
    if groups is None and chosen is None:
        return
    for name in ("moe_router_num_groups", "moe_router_group_topk"):
        if getattr(config, name) is None:
            refuse(config, name, "a number: moe_router_num_groups and moe_router_group_topk only work together")
    if experts % groups:
        refuse(config, "moe_router_num_groups", f"a divisor of num_moe_experts = {experts}")
    if chosen > groups:
        refuse(config, "moe_router_group_topk", f"at most moe_router_num_groups = {groups}")
    reachable = chosen * (experts // groups)
    if config.moe_router_topk > reachable:
        refuse(config, "moe_router_topk", f"at most {reachable}, the experts in {chosen} of {groups} groups")


def check_fp8(config: Any) -> None:
    if config.fp8 is None:
        for name in FP8_FIELDS[1:]:
            default = getattr(type(config), name)
            if getattr(config, name) != default:
                refuse(config, name, f"{default!r}, the default, if fp8 is None; set fp8 too")
        return
    if config.fp8 not in ("e4m3", "hybrid"):
        refuse(config, "fp8", "'e4m3', 'hybrid', or None")
    recipe = config.fp8_recipe
    if config.fp8 == "hybrid" and recipe == "mxfp8":
        refuse(config, "fp8", "'e4m3' with fp8_recipe 'mxfp8', whose gradients are e4m3 too")
    left = config.num_layers_at_start_in_bf16 + config.num_layers_at_end_in_bf16
    if config.first_last_layers_bf16 and left > config.num_layers:
        most = f"at most num_layers = {config.num_layers} together with num_layers_at_end_in_bf16"
        refuse(config, "num_layers_at_start_in_bf16", most)
    for name, width in _widths_of_products(config).items():
        if width % FP8_MULTIPLES[recipe]:
            expected = f"a multiple of {FP8_MULTIPLES[recipe]} with fp8_recipe {recipe!r}, or fp8 None"
            raise ValueError(f"TransformerConfig.{name}: got {width!r}, expected {expected}.")


def _widths_of_products(config: Any) -> dict[str, int]:
    """Return the channels that products in 8 bits read and write, by the fields that set them."""
    heads, groups = config.num_attention_heads, config.num_query_groups
    widths = {"hidden_size": config.hidden_size}
    moe_layers = [config.is_moe_layer(layer) for layer in range(config.num_layers)]
    if any(moe_layers):
        widths["moe_ffn_hidden_size"] = config.moe_ffn_hidden_size
        widths["moe_shared_expert_intermediate_size"] = config.moe_shared_expert_intermediate_size or 0
    if not all(moe_layers):
        widths["ffn_hidden_size"] = config.ffn_hidden_size
    if config.multi_latent_attention:
        # The one field that is left out: linear_kv_down_proj stays in 16 bits if its width, 576 in DeepSeek-V3, is not one.
        widths |= {"q_lora_rank": config.q_lora_rank or 0, "kv_lora_rank": config.kv_lora_rank}
        channels = {"qk_head_dim + qk_pos_emb_head_dim": config.qk_head_dim + config.qk_pos_emb_head_dim}
        channels |= {
            "qk_head_dim + v_head_dim": config.qk_head_dim + config.v_head_dim,
            "v_head_dim": config.v_head_dim,
        }
        return widths | {f"num_attention_heads * ({name})": heads * width for name, width in channels.items()}
    names = {"num_attention_heads": heads, "(num_attention_heads + 2 * num_query_groups)": heads + 2 * groups}
    return widths | {f"kv_channels * {name}": config.kv_channels * count for name, count in names.items()}
