"""Rules about CUDA graphs. recollect captures none yet, so settings that pass these rules still raise NotYetError."""

from __future__ import annotations

from recollect.integrations.megatron.recompute_settings import RecomputeSettings
from recollect.integrations.megatron.rule import Clash, Rule, found
from recollect.integrations.megatron.rules_offload import version_of
from recollect.integrations.megatron.training_setting import TrainingSetting

__all__ = ["CUDA_GRAPH_RULES"]

_PER_LAYER = ("local", "transformer_engine")
_PARTIAL_MOE = frozenset({"expert_fc1", "moe_act", "fused_group_mlp"})
_NO_GRAPH = "Set cuda_graph_impl to 'none'"


def _impl(_: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    if setting.cuda_graph_impl in ("none", *_PER_LAYER, "full_iteration"):
        return None
    return Clash(found(setting, "cuda_graph_impl"), "unknown way to capture", f"{_NO_GRAPH}, or one of {_PER_LAYER}.")


def _captures(setting: TrainingSetting, *modules: str) -> bool:
    """Return whether a graph captures one of these modules."""
    if setting.cuda_graph_impl == "none":
        return False
    if setting.cuda_graph_impl == "full_iteration" or not setting.cuda_graph_modules:
        return True
    return any(module in setting.cuda_graph_modules for module in modules)


def _graph(config: RecomputeSettings, setting: TrainingSetting, *others: str) -> dict[str, object]:
    return {**found(config, *others), **found(setting, "cuda_graph_impl", "cuda_graph_modules")}


def _modules(config: RecomputeSettings, setting: TrainingSetting, *others: str) -> dict[str, object]:
    values = {"recompute_modules": config.modules, **found(setting, *others)}
    return {**values, **found(setting, "cuda_graph_impl", "cuda_graph_modules")}


def _layer_offload(config: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    if not config.cpu_offloading or setting.cuda_graph_impl not in _PER_LAYER:
        return None
    return Clash(
        _graph(config, setting, "cpu_offloading"),
        "a layer's graph cannot hold copies to the host",
        f"{_NO_GRAPH} or 'full_iteration'.",
    )


def _full(config: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    if config.recompute_granularity != "full" or setting.cuda_graph_impl not in _PER_LAYER:
        return None
    return Clash(
        _graph(config, setting, "recompute_granularity"),
        "recompute of whole layers does not fit into graphs of single layers",
        f"Set recompute_granularity to 'selective'. Or: {_NO_GRAPH} or 'full_iteration'.",
    )


def _moe_router(config: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    is_captured = setting.cuda_graph_impl == "transformer_engine" and "moe_router" in setting.cuda_graph_modules
    if "moe" not in config.modules or not is_captured:
        return None
    return Clash(
        _modules(config, setting),
        "the graph of the router lies inside recomputed code",
        "Leave out moe, or moe_router.",
    )


def _attention_dropout(config: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    if "core_attn" not in config.modules or not setting.attention_dropout or not _captures(setting, "attn"):
        return None
    return Clash(
        _modules(config, setting, "attention_dropout"),
        "recomputed code in a graph must not draw random numbers",
        "Set attention_dropout to 0, or leave core_attn or the graph of attn out.",
    )


def _hidden_dropout(config: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    if not setting.hidden_dropout:
        return None
    for module in ("mlp", "moe"):
        if module in config.modules and _captures(setting, module):
            return Clash(
                _modules(config, setting, "hidden_dropout"),
                "recomputed code in a graph must not draw random numbers",
                f"Set hidden_dropout to 0, or leave {module} out on one side.",
            )
    return None


def _jitter(config: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    if "moe" not in config.modules or setting.moe_input_jitter_eps is None or not _captures(setting, "moe"):
        return None
    return Clash(
        _modules(config, setting, "moe_input_jitter_eps"),
        "recomputed code in a graph must not draw random numbers",
        "Leave out moe_input_jitter_eps, or moe on one side.",
    )


def _gtp(config: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    is_captured = setting.cuda_graph_impl == "local" and _captures(setting, "moe", "moe_router")
    is_8_bit = setting.fp8 is not None or setting.fp4 is not None
    has_shared = setting.moe_shared_expert_intermediate_size is not None and not setting.moe_shared_expert_overlap
    if "shared_experts" not in config.modules or setting.gtp_weight_remat_size == 1:
        return None
    if not (is_captured and is_8_bit and has_shared):
        return None
    return Clash(
        _modules(config, setting, "gtp_weight_remat_size", "fp8", "fp4"),
        "capture takes gradients in a way that recompute of an 8-bit module cannot",
        "Leave out shared_experts, or set cuda_graph_impl to 'full_iteration'.",
    )


def _fine_grained(config: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    """Return the first broken one of the limits of offloading in graphs."""
    if not config.fine_grained_activation_offloading or setting.cuda_graph_impl == "none":
        return None
    offloaded = frozenset(config.offload_modules)
    settings = _graph(config, setting, "offload_modules")
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


def _offload_version(config: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    version = setting.transformer_engine_version
    if not config.fine_grained_activation_offloading or setting.cuda_graph_impl != "transformer_engine":
        return None
    if version is None or version_of(version) >= (2, 14):
        return None
    return Clash(
        _graph(config, setting, "offload_modules") | {"transformer_engine_version": version},
        "graphs can offload from Transformer Engine 2.14 on",
        "Update it, or set cuda_graph_impl to 'none'.",
    )


def _norm_in_graph(config: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    captured = setting.cuda_graph_modules
    if setting.cuda_graph_impl != "transformer_engine" or "moe_router" not in captured:
        return None
    if "layernorm" not in config.modules:
        return None
    can_dispatch = setting.moe_token_dispatcher_type == "alltoall" or setting.moe_latent_size is not None
    if "moe_preprocess" in captured and can_dispatch and not setting.moe_shared_expert_overlap:
        return None
    return Clash(
        _modules(config, setting, "moe_token_dispatcher_type", "moe_shared_expert_overlap"),
        "the norm before the experts lies at the edge of the graph of the router, and would silently be kept",
        "Leave out layernorm, or moe_router of cuda_graph_modules.",
    )


def _offload_norm(config: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    """Return the clash of a norm whose input is that of a graph."""
    if not config.fine_grained_activation_offloading or setting.cuda_graph_impl != "transformer_engine":
        return None
    at_edge = {"attn_norm": ("attn",), "mlp_norm": ("mlp", "moe", "moe_router")}
    for norm, captured in at_edge.items():
        if norm in config.offload_modules and _captures(setting, *captured):
            return Clash(
                _graph(config, setting, "offload_modules"),
                f"the input of {norm} belongs to the graph, and would silently stay on the device",
                f"Leave out {norm}, or the graph.",
            )
    return None


_LATER = "nothing here can show yet that it works"

CUDA_GRAPH_RULES = (
    Rule(
        name="graph-impl",
        when="`cuda_graph_impl` is not one of its four values",
        megatron="AssertionError",
        ours="error",
        why="meaningless",
        within=_impl,
    ),
    Rule(
        name="graph-layer-offload",
        when="`cpu_offloading` with graphs of layers",
        megatron="ValueError",
        ours="error",
        why=_LATER,
        within=_layer_offload,
    ),
    Rule(
        name="graph-full",
        when="`full` with graphs of layers",
        megatron="AssertionError",
        ours="error",
        why=_LATER,
        within=_full,
    ),
    Rule(
        name="graph-moe-router",
        when="`moe` with a graph of `moe_router` by Transformer Engine",
        megatron="AssertionError",
        ours="error",
        why="a graph cannot lie inside recomputed code",
        within=_moe_router,
    ),
    Rule(
        name="graph-attention-dropout",
        when="`core_attn` in a graph with `attention_dropout`",
        megatron="AssertionError",
        ours="error",
        why=_LATER,
        within=_attention_dropout,
    ),
    Rule(
        name="graph-hidden-dropout",
        when="`mlp` or `moe` in a graph with `hidden_dropout`",
        megatron="AssertionError",
        ours="error",
        why=_LATER,
        within=_hidden_dropout,
    ),
    Rule(
        name="graph-jitter",
        when="`moe` in a graph with `moe_input_jitter_eps`",
        megatron="AssertionError",
        ours="error",
        why=_LATER,
        within=_jitter,
    ),
    Rule(
        name="graph-gtp",
        when="`shared_experts` in a local graph, in 8 or 4 bits, with `gtp_weight_remat_size` above 1",
        megatron="AssertionError",
        ours="error",
        why=_LATER,
        within=_gtp,
    ),
    Rule(
        name="graph-fine-grained",
        when="`fine_grained_activation_offloading` with graphs: other modules than the experts' in local ones, whole layers, "
        "`moe` captured, no warm-up step, a whole step without `fine_grained_offloading_max_inflight_offloads`",
        megatron="AssertionError",
        ours="error",
        why=_LATER,
        within=_fine_grained,
    ),
    Rule(
        name="graph-offload-version",
        when="`fine_grained_activation_offloading` with graphs by a Transformer Engine before 2.14",
        megatron="AssertionError when the model is built",
        ours="error",
        why="a limit of that library",
        within=_offload_version,
    ),
    Rule(
        name="graph-norm",
        when="`layernorm` with a graph of `moe_router` at whose edge the norm lies",
        megatron="warning when the model is built; the norm is kept",
        ours="error",
        why="the request would silently not be met",
        within=_norm_in_graph,
    ),
    Rule(
        name="graph-offload-norm",
        when="offload of `attn_norm` or `mlp_norm` with a graph that takes the same input",
        megatron="warning when the model is built; the input stays",
        ours="error",
        why="the request would silently not be met",
        within=_offload_norm,
    ),
)
