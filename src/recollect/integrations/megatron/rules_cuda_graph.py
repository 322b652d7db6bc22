"""Rules about CUDA graphs. recollect captures none yet, so settings that pass these rules still raise NotYetError."""

from __future__ import annotations

from functools import partial

from recollect.integrations.megatron.condition import ON, Condition, one_of, other_than, version_of
from recollect.integrations.megatron.recompute_settings import RecomputeSettings
from recollect.integrations.megatron.rule import Clash, Rule, found
from recollect.integrations.megatron.training_setting import TrainingSetting

__all__ = ["CUDA_GRAPH_RULES"]

_PER_LAYER = ("local", "transformer_engine")
_OF_LAYERS = Condition(lambda impl: impl in _PER_LAYER, "graphs of layers")
_PARTIAL_MOE = frozenset({"expert_fc1", "moe_act", "fused_group_mlp"})
_GRAPH = ("cuda_graph_impl", "cuda_graph_modules")
_NO_GRAPH = "Set cuda_graph_impl to 'none'"
_RANDOM = "recomputed code in a graph must not draw random numbers"
_AFTER_NORM = {"attn_norm": ("attn",), "mlp_norm": ("mlp", "moe", "moe_router")}


def _captures(setting: TrainingSetting, *modules: str) -> bool:
    """Return whether a graph captures one of these modules."""
    if setting.cuda_graph_impl == "none":
        return False
    if setting.cuda_graph_impl == "full_iteration" or not setting.cuda_graph_modules:
        return True
    return any(module in setting.cuda_graph_modules for module in modules)


def _is_router_captured(setting: TrainingSetting) -> bool:
    return setting.cuda_graph_impl == "transformer_engine" and "moe_router" in setting.cuda_graph_modules


def _is_gtp_in_8_bits(config: RecomputeSettings, setting: TrainingSetting) -> bool:
    """Return whether shared experts are recomputed that a local graph captures in 8 or 4 bits."""
    is_captured = setting.cuda_graph_impl == "local" and _captures(setting, "moe", "moe_router")
    is_8_bit = setting.fp8 is not None or setting.fp4 is not None
    has_shared = setting.moe_shared_expert_intermediate_size is not None and not setting.moe_shared_expert_overlap
    is_gtp = "shared_experts" in config.modules and setting.gtp_weight_remat_size != 1
    return is_gtp and is_captured and is_8_bit and has_shared


def _is_norm_at_edge(config: RecomputeSettings, setting: TrainingSetting) -> bool:
    """Return whether a recomputed norm lies between a captured router and what no graph captures."""
    can_dispatch = setting.moe_token_dispatcher_type == "alltoall" or setting.moe_latent_size is not None
    is_inside = (
        "moe_preprocess" in setting.cuda_graph_modules and can_dispatch and not setting.moe_shared_expert_overlap
    )
    return _is_router_captured(setting) and "layernorm" in config.modules and not is_inside


def _offloads_in_layers(config: RecomputeSettings, setting: TrainingSetting) -> bool:
    return config.fine_grained_activation_offloading and setting.cuda_graph_impl == "transformer_engine"


def _fine_grained(config: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    """Return the first broken one of the limits of offloading in graphs."""
    if not config.fine_grained_activation_offloading or setting.cuda_graph_impl == "none":
        return None
    offloaded = frozenset(config.offload_modules)
    settings = {**found(config, "offload_modules"), **found(setting, *_GRAPH)}
    if setting.cuda_graph_impl == "local":
        if others := sorted(offloaded - _PARTIAL_MOE):
            return Clash(
                settings, f"a local graph cannot offload {others[0]}", "Set cuda_graph_impl to 'transformer_engine'."
            )
        if not setting.cuda_graph_modules:
            return Clash(
                settings, "a graph of the whole layer cannot offload", "Set cuda_graph_modules to what is captured."
            )
    if "moe" in setting.cuda_graph_modules:
        return Clash(settings, "a graph of the experts cannot offload", "Leave moe out of cuda_graph_modules.")
    if setting.cuda_graph_warmup_steps < 1:
        return Clash(
            {**settings, **found(setting, "cuda_graph_warmup_steps")},
            "a step before the capture learns what to offload",
            "Set cuda_graph_warmup_steps to 1 or more.",
        )
    if setting.cuda_graph_impl == "full_iteration" and config.fine_grained_offloading_max_inflight_offloads is None:
        return Clash(
            {**settings, **found(config, "fine_grained_offloading_max_inflight_offloads")},
            "a graph of the whole step needs a limit on the copies in flight",
            "Set fine_grained_offloading_max_inflight_offloads to 0 or more.",
        )
    return None


_LATER = "nothing here can show yet that it works"
_assertion = partial(Rule, megatron="AssertionError", why=_LATER)

CUDA_GRAPH_RULES = {
    "graph-impl": Rule(
        when="`cuda_graph_impl` is not one of its four values",
        megatron="AssertionError",
        breaks={"cuda_graph_impl": other_than("none", *_PER_LAYER, "full_iteration")},
        reason="unknown way to capture",
        advice=f"{_NO_GRAPH}, or one of {_PER_LAYER}.",
    ),
    "graph-layer-offload": Rule(
        why=_LATER,
        breaks={"cpu_offloading": ON, "cuda_graph_impl": _OF_LAYERS},
        settings=("cpu_offloading", *_GRAPH),
        reason="a layer's graph cannot hold copies to the host",
        advice=f"{_NO_GRAPH} or 'full_iteration'.",
    ),
    "graph-full": _assertion(
        breaks={"recompute_granularity": one_of("full"), "cuda_graph_impl": _OF_LAYERS},
        settings=("recompute_granularity", *_GRAPH),
        reason="recompute of whole layers does not fit into graphs of single layers",
        advice=f"Set recompute_granularity to 'selective'. Or: {_NO_GRAPH} or 'full_iteration'.",
    ),
    "graph-moe-router": Rule(
        when="`moe` with a graph of `moe_router` by Transformer Engine",
        megatron="AssertionError",
        within=lambda config, setting: "moe" in config.modules and _is_router_captured(setting),
        settings=("modules", *_GRAPH),
        reason="the graph of the router lies inside recomputed code",
        advice="Leave out moe, or moe_router.",
    ),
    "graph-attention-dropout": _assertion(
        when="`core_attn` in a graph with `attention_dropout`",
        within=lambda config, setting: (
            "core_attn" in config.modules and setting.attention_dropout and _captures(setting, "attn")
        ),
        settings=("modules", "attention_dropout", *_GRAPH),
        reason=_RANDOM,
        advice="Set attention_dropout to 0, or leave core_attn or the graph of attn out.",
    ),
    "graph-hidden-dropout": _assertion(
        when="`mlp` or `moe` in a graph with `hidden_dropout`",
        within=lambda config, setting: [
            module
            for module in ("mlp", "moe")
            if setting.hidden_dropout and module in config.modules and _captures(setting, module)
        ],
        settings=("modules", "hidden_dropout", *_GRAPH),
        reason=_RANDOM,
        advice="Set hidden_dropout to 0, or leave {} out on one side.",
    ),
    "graph-jitter": _assertion(
        when="`moe` in a graph with `moe_input_jitter_eps`",
        within=lambda config, setting: (
            "moe" in config.modules and setting.moe_input_jitter_eps is not None and _captures(setting, "moe")
        ),
        settings=("modules", "moe_input_jitter_eps", *_GRAPH),
        reason=_RANDOM,
        advice="Leave out moe_input_jitter_eps, or moe on one side.",
    ),
    "graph-gtp": _assertion(
        when="`shared_experts` in a local graph, in 8 or 4 bits, with `gtp_weight_remat_size` above 1",
        within=_is_gtp_in_8_bits,
        settings=("modules", "gtp_weight_remat_size", "fp8", "fp4", *_GRAPH),
        reason="capture takes gradients in a way that recompute of an 8-bit module cannot",
        advice="Leave out shared_experts, or set cuda_graph_impl to 'full_iteration'.",
    ),
    "graph-fine-grained": _assertion(
        when="`fine_grained_activation_offloading` with graphs: other modules than the experts' in local ones, whole layers, "
        "`moe` captured, no warm-up step, a whole step without `fine_grained_offloading_max_inflight_offloads`",
        within=_fine_grained,
    ),
    "graph-offload-version": Rule(
        when="`fine_grained_activation_offloading` with graphs by a Transformer Engine before 2.14",
        megatron="AssertionError when the model is built",
        within=lambda config, setting: (
            _offloads_in_layers(config, setting)
            and setting.transformer_engine_version is not None
            and version_of(setting.transformer_engine_version) < (2, 14)
        ),
        settings=("offload_modules", *_GRAPH, "transformer_engine_version"),
        reason="graphs can offload from Transformer Engine 2.14 on",
        advice="Update it, or set cuda_graph_impl to 'none'.",
    ),
    "graph-norm": Rule(
        when="`layernorm` with a graph of `moe_router` at whose edge the norm lies",
        megatron="warning when the model is built; the norm is kept",
        within=_is_norm_at_edge,
        settings=("modules", "moe_token_dispatcher_type", "moe_shared_expert_overlap", *_GRAPH),
        reason="the norm before the experts lies at the edge of the graph of the router, and would silently be kept",
        advice="Leave out layernorm, or moe_router of cuda_graph_modules.",
    ),
    "graph-offload-norm": Rule(
        when="offload of `attn_norm` or `mlp_norm` with a graph that takes the same input",
        megatron="warning when the model is built; the input stays",
        why="the request would silently not be met",
        within=lambda config, setting: [
            norm
            for norm, captured in _AFTER_NORM.items()
            if _offloads_in_layers(config, setting) and norm in config.offload_modules and _captures(setting, *captured)
        ],
        settings=("offload_modules", *_GRAPH),
        reason="the input of {} belongs to the graph, and would silently stay on the device",
        advice="Leave out {}, or the graph.",
    ),
}
