"""What breaks those of the rules in rules.yaml that compare more than single values, by the names of the rules."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Final

from recollect.integrations.megatron.pipeline import chunk_sizes
from recollect.integrations.megatron.recompute_settings import RecomputeSettings
from recollect.integrations.megatron.rule import Broken, Clash, found, version_of
from recollect.integrations.megatron.training_setting import TrainingSetting

# By the annotations of the settings.
_TYPES: Final[Mapping[str, tuple[str, tuple[type, ...]]]] = {
    "bool": ("True or False", (bool,)),
    "int": ("a whole number", (int,)),
    "int | None": ("a whole number or None", (int, type(None))),
    "float": ("a number", (int, float)),
}
_AFTER_NORM = {"attn_norm": ("attn",), "mlp_norm": ("mlp", "moe", "moe_router")}
_PARTIAL_MOE = frozenset({"expert_fc1", "moe_act", "fused_group_mlp"})


def _types(config: RecomputeSettings) -> Clash | None:
    for field in fields(config):
        expected, right = _TYPES.get(str(field.type), ("", ()))
        value = getattr(config, field.name)
        # Not isinstance: a bool is an int to Python. And recompute_num_layers has a rule of its own.
        if expected and type(value) not in right and field.name != "recompute_num_layers":
            return Clash({field.name: value}, f"{type(value).__name__} is the wrong type", f"Set it to {expected}.")
    return None


def _num_layers_in_range(config: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    return None if setting.num_layers is None else num_layers_clash(config, chunk_sizes(setting, setting.num_layers))


def num_layers_clash(config: RecomputeSettings, sizes: list[int]) -> Clash | None:
    """Return the clash if more layers should be recomputed than the largest model chunk has."""
    value = config.recompute_num_layers
    if config.recompute_granularity != "full" or value is None or value <= max(sizes):
        return None
    chunks = "the model has" if len(sizes) == 1 else f"the largest of {len(sizes)} model chunks has"
    return Clash(
        {"recompute_method": config.recompute_method, "recompute_num_layers": value},
        f"{chunks} {max(sizes)} layers",
        f"Set recompute_num_layers to 1 to {max(sizes)}; it is counted in each virtual pipeline stage.",
    )


def _without_granularity(config: RecomputeSettings) -> Clash | None:
    if config.is_selective or config.recompute_granularity is not None:
        return None
    names = ("recompute_method", "recompute_num_layers", "recompute_modules", "recompute_discard_outputs")
    given = {name: getattr(config, name) for name in names if getattr(config, name)}
    if not given:
        return None
    return Clash(
        {"recompute_granularity": None, **given},
        "without a granularity nothing is recomputed",
        "Set recompute_granularity to 'full' or 'selective', or leave the others out.",
    )


def _moe_layer_recompute(config: RecomputeSettings) -> Broken:
    if not config.moe_layer_recompute or config.recompute_granularity == "full":
        return []
    return [" ".join(config.modules), list(config.modules)]


def _is_a_list(config: RecomputeSettings) -> Clash | None:
    for name in ("recompute_modules", "recompute_discard_outputs", "offload_modules"):
        value = getattr(config, name)
        if isinstance(value, str):
            return Clash({name: value}, "a string, not a list", f"Write {[part for part in value.split(',') if part]}.")
        if value is not None and not (isinstance(value, tuple) and all(isinstance(part, str) for part in value)):
            return Clash({name: value}, "not a list of names", "Write a list such as ['core_attn', 'mlp'].")
    return None


def _discarded_is_recomputed(config: RecomputeSettings) -> Clash | None:
    modules = config.modules if config.is_selective else (config.recompute_modules or ())
    others = [name for name in config.recompute_discard_outputs or () if name not in modules]
    if not others:
        return None
    return Clash(
        {"recompute_modules": modules, **found(config, "recompute_discard_outputs")},
        f"the output of {others[0]!r} can only be dropped if the module is recomputed",
        "Add it to recompute_modules.",
    )


def _every_layer(config: RecomputeSettings, setting: TrainingSetting) -> list[int]:
    if not config.cpu_offloading or setting.num_layers is None:
        return []
    return [setting.num_layers - 1] if config.cpu_offloading_num_layers >= setting.num_layers else []


def _numbers(config: RecomputeSettings) -> Clash | None:
    for name, most in (
        ("min_offloaded_tensor_size", None),
        ("activation_offload_fraction", 1),
        ("delta_offload_bytes_across_pp_ranks", None),
        ("fine_grained_offloading_max_inflight_offloads", None),
    ):
        value = getattr(config, name)
        if value is not None and not (value >= 0 and (most is None or value <= most)):
            return Clash({name: value}, "out of range", f"Set it to {'0 or more' if most is None else '0 to 1'}.")
    return None


def _is_gtp_in_8_bits(config: RecomputeSettings, setting: TrainingSetting) -> bool:
    """Return whether shared experts are recomputed that a local graph captures in 8 or 4 bits."""
    is_captured = setting.cuda_graph_impl == "local" and not {"moe", "moe_router"}.isdisjoint(setting.captured)
    is_8_bit = setting.fp8 is not None or setting.fp4 is not None
    has_shared = setting.moe_shared_expert_intermediate_size is not None and not setting.moe_shared_expert_overlap
    is_gtp = "shared_experts" in config.modules and setting.gtp_weight_remat_size != 1
    return is_gtp and is_captured and is_8_bit and has_shared


def _is_norm_at_edge(config: RecomputeSettings, setting: TrainingSetting) -> bool:
    """Return whether a recomputed norm lies between a router that Transformer Engine captures and what no graph captures."""
    can_dispatch = setting.moe_token_dispatcher_type == "alltoall" or setting.moe_latent_size is not None
    is_inside = (
        "moe_preprocess" in setting.cuda_graph_modules and can_dispatch and not setting.moe_shared_expert_overlap
    )
    is_captured = setting.cuda_graph_impl == "transformer_engine" and "moe_router" in setting.cuda_graph_modules
    return is_captured and "layernorm" in config.modules and not is_inside


def _fine_grained(config: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    """Return the first broken one of the limits of offloading in graphs."""
    if not config.fine_grained_activation_offloading or setting.cuda_graph_impl == "none":
        return None
    settings = {**found(config, "offload_modules"), **found(setting, "cuda_graph_impl", "cuda_graph_modules")}
    if setting.cuda_graph_impl == "local":
        if others := sorted(frozenset(config.offload_modules) - _PARTIAL_MOE):
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


def _offloads_in_graphs(config: RecomputeSettings, setting: TrainingSetting) -> bool:
    return config.fine_grained_activation_offloading and setting.cuda_graph_impl == "transformer_engine"


def _overlap(config: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    if not setting.overlap_moe_expert_parallel_comm:
        return None
    names = ("recompute_granularity", "recompute_method", "recompute_num_layers")
    is_full = config.recompute_granularity == "full"
    if not is_full and config.recompute_num_layers is None and "moe" not in config.modules:
        return None
    concerned = found(config, *names) if "moe" not in config.modules else {"recompute_modules": config.modules}
    return Clash(
        {**concerned, **found(setting, "overlap_moe_expert_parallel_comm")},
        "a micro-batch's forward runs between parts of another's layer, which recompute would run in one piece",
        "Recompute other modules than moe, or leave out overlap_moe_expert_parallel_comm.",
    )


def _mtp_block(config: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    if not setting.mtp_num_layers or config.recompute_granularity != "full" or config.recompute_method != "block":
        return None
    return mtp_block_clash(config, setting.mtp_num_layers)


def mtp_block_clash(config: RecomputeSettings, num_heads: int) -> Clash:
    """Return the clash of multi-token prediction layers with `block`."""
    return Clash(
        {"mtp_num_layers": num_heads, **found(config, "recompute_method")},
        "multi-token prediction layers come after those of the last stage, and block recomputes the first ones",
        "Set recompute_method to 'uniform' to recompute them too.",
    )


ALONE: Final[Mapping[str, Callable[[RecomputeSettings], Broken]]] = {
    "types": _types,
    "needs-granularity": _without_granularity,
    "moe-layer-recompute": _moe_layer_recompute,
    "micro-batches-alike": lambda config: (
        config.num_microbatches_with_partial_activation_checkpoints is not None
        and (config.recompute_granularity, config.recompute_method) != ("full", "block")
    ),
    "list-of-modules": _is_a_list,
    "discard-outputs": _discarded_is_recomputed,
    "offload-attn-proj": lambda config: "attn_proj" in config.offloaded and "core_attn" not in config.offloaded,
    "offload-numbers": _numbers,
    "gdp-range": lambda config: not 0 <= config.gdp_num_chunk_states_to_recompute <= 64,
}
"""By the configuration alone."""

WITHIN: Final[Mapping[str, Callable[[RecomputeSettings, TrainingSetting], Broken]]] = {
    "num-layers-range": _num_layers_in_range,
    "offload-num-layers": _every_layer,
    "offload-v1": lambda config, setting: (
        config.fine_grained_activation_offloading
        and version_of(setting.transformer_engine_version) >= (2, 10)
        and os.environ.get("NVTE_CPU_OFFLOAD_V1") != "1"
    ),
    "graph-hidden-dropout": lambda config, setting: [
        module
        for module in ("mlp", "moe")
        if setting.hidden_dropout and module in config.modules and module in setting.captured
    ],
    "graph-gtp": _is_gtp_in_8_bits,
    "graph-fine-grained": _fine_grained,
    "graph-offload-version": lambda config, setting: (
        _offloads_in_graphs(config, setting)
        and setting.transformer_engine_version is not None
        and version_of(setting.transformer_engine_version) < (2, 14)
    ),
    "graph-norm": _is_norm_at_edge,
    "graph-offload-norm": lambda config, setting: [
        norm
        for norm, after in _AFTER_NORM.items()
        if _offloads_in_graphs(config, setting) and norm in config.offloaded and {*after} & {*setting.captured}
    ],
    "mhc-without-recompute": lambda config, setting: (
        setting.enable_mhc_connections and "mhc" not in config.modules and config.recompute_granularity != "full"
    ),
    "expert-overlap": _overlap,
    "mtp-block": _mtp_block,
}
"""By the configuration with the rest of the training's settings."""
