"""Rules about 8-bit precision, hyper-connections, delta nets, expert overlap, and multi-token prediction."""

from __future__ import annotations

from recollect.integrations.megatron.recompute_settings import RecomputeSettings
from recollect.integrations.megatron.rule import Clash, Rule, found
from recollect.integrations.megatron.rules_offload import version_of
from recollect.integrations.megatron.training_setting import TrainingSetting

__all__ = ["OTHER_RULES", "mtp_block_clash"]

_8_BIT_SENSITIVE = ("moe_act", "layernorm")


def _modules(config: RecomputeSettings, setting: TrainingSetting, *others: str) -> dict[str, object]:
    return {"recompute_modules": config.modules, **found(setting, *others)}


def _is_8_bit_sensitive(config: RecomputeSettings, setting: TrainingSetting) -> bool:
    return setting.fp8 is not None and any(name in config.modules for name in _8_BIT_SENSITIVE)


def _fp8_delayed(config: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    if not _is_8_bit_sensitive(config, setting) or setting.fp8_recipe != "delayed":
        return None
    return Clash(
        _modules(config, setting, "fp8", "fp8_recipe"),
        "delayed scaling records what it sees, and recompute would show it everything twice",
        "Choose another fp8_recipe, or leave out moe_act and layernorm.",
    )


def _fp8_version(config: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    version = setting.transformer_engine_version
    if not _is_8_bit_sensitive(config, setting) or version_of(version) >= (2, 6):
        return None
    return Clash(
        _modules(config, setting, "fp8", "transformer_engine_version"),
        "the layer after them has to keep its input in 16 bits, which Transformer Engine supports from 2.6 on",
        "Update it, or leave out moe_act and layernorm.",
    )


def _mhc_enabled(config: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    if "mhc" not in config.modules or setting.enable_mhc_connections:
        return None
    return Clash(
        _modules(config, setting, "enable_mhc_connections"),
        "there are no hyper-connections",
        "Leave out mhc, or set enable_mhc_connections.",
    )


def _mhc_and_mlp(config: RecomputeSettings) -> Clash | None:
    if not {"mhc", "mlp"} <= set(config.modules):
        return None
    return Clash({"recompute_modules": config.modules}, "mhc recomputes around the mlp", "Leave out one of them.")


def _mhc_num_layers(config: RecomputeSettings) -> Clash | None:
    value = config.mhc_recompute_layer_num
    if "mhc" not in config.modules or value is None or value >= 1:
        return None
    return Clash(
        found(config, "mhc_recompute_layer_num"), "not a number of layers", "Set it to 1 or more, or None for all."
    )


def _mhc_and_offload(config: RecomputeSettings) -> Clash | None:
    if "mhc" not in config.modules or not config.fine_grained_activation_offloading:
        return None
    return Clash(
        {"recompute_modules": config.modules, **found(config, "fine_grained_activation_offloading")},
        "mhc would be recomputed before its inputs are back",
        "Leave out one of them.",
    )


def _mhc_without_recompute(config: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    if not setting.enable_mhc_connections or "mhc" in config.modules or config.recompute_granularity == "full":
        return None
    return Clash(
        {**found(setting, "enable_mhc_connections"), "recompute_modules": config.modules},
        "hyper-connections keep several residual streams per layer",
        "Consider recompute_modules with mhc.",
    )


def _mhc_and_full(config: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    if not setting.enable_mhc_connections or config.recompute_granularity != "full":
        return None
    return Clash(
        {**found(setting, "enable_mhc_connections"), **found(config, "recompute_granularity")},
        "no model here has hyper-connections to try it on",
        "Set recompute_granularity to 'selective' with mhc.",
    )


def _mhc_and_pipeline(_: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    if not setting.enable_mhc_connections or setting.pipeline_model_parallel_size == 1:
        return None
    return Clash(
        found(setting, "enable_mhc_connections", "pipeline_model_parallel_size"),
        "stages would pass on several residual streams",
        "Set pipeline_model_parallel_size to 1.",
    )


def _mhc_and_mtp(_: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    if not setting.enable_mhc_connections or setting.mtp_num_layers is None:
        return None
    return Clash(
        found(setting, "enable_mhc_connections", "mtp_num_layers"),
        "multi-token prediction layers expect one residual stream",
        "Leave out one of them.",
    )


def _gdp_range(config: RecomputeSettings) -> Clash | None:
    if 0 <= config.gdp_num_chunk_states_to_recompute <= 64:
        return None
    return Clash(found(config, "gdp_num_chunk_states_to_recompute"), "out of range", "Set it to 0 to 64.")


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


def _overlap_offload(config: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    is_nccl = setting.moe_token_dispatcher_type == "flex" and setting.moe_flex_dispatcher_backend == "ncclep"
    if not setting.overlap_moe_expert_parallel_comm or not is_nccl or "expert_fc1" not in config.offload_modules:
        return None
    return Clash(
        {**found(config, "offload_modules"), **found(setting, "moe_flex_dispatcher_backend")},
        "the input of expert_fc1 is freed early on this path",
        "Leave out expert_fc1.",
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


OTHER_RULES = (
    Rule(
        name="fp8-delayed",
        when="`fp8` by the recipe `delayed` with `moe_act` or `layernorm`",
        megatron="ValueError",
        ours="error",
        why="a limit of the recipe",
        within=_fp8_delayed,
    ),
    Rule(
        name="fp8-version",
        when="`fp8` with `moe_act` or `layernorm` on a Transformer Engine before 2.6",
        megatron="ValueError",
        ours="error",
        why="a limit of that library",
        within=_fp8_version,
    ),
    Rule(
        name="fp8-absorbed-mla",
        when="`fp8` or `fp4` with `mla_up_proj` in an absorbed latent attention",
        megatron="AssertionError when the model is built",
        ours="not yet",
        why="nor are `fp8` and `fp4`",
    ),
    Rule(
        name="mhc-needs-mhc",
        when="`mhc` without `enable_mhc_connections`",
        megatron="ValueError",
        ours="error",
        why="the model has no such module",
        within=_mhc_enabled,
    ),
    Rule(
        name="mhc-and-mlp",
        when="`mhc` with `mlp`",
        megatron="ValueError",
        ours="error",
        why="no model here has hyper-connections to try it on",
        alone=_mhc_and_mlp,
    ),
    Rule(
        name="mhc-num-layers",
        when="`mhc` with `mhc_recompute_layer_num` below 1",
        megatron="ValueError",
        ours="error",
        why="meaningless",
        alone=_mhc_num_layers,
    ),
    Rule(
        name="mhc-and-offload",
        when="`mhc` with `fine_grained_activation_offloading`",
        megatron="NotImplementedError",
        ours="error",
        why="no model here has hyper-connections to try it on",
        alone=_mhc_and_offload,
    ),
    Rule(
        name="mhc-without-recompute",
        when="`enable_mhc_connections` without recompute of `mhc`",
        megatron="warning",
        ours="warning",
        why="hyper-connections keep many values",
        within=_mhc_without_recompute,
    ),
    Rule(
        name="mhc-and-full",
        when="`enable_mhc_connections` with `full`",
        megatron="NotImplementedError",
        ours="error",
        why="no model here has hyper-connections to try it on",
        within=_mhc_and_full,
    ),
    Rule(
        name="mhc-and-pipeline",
        when="`enable_mhc_connections` with `pipeline_model_parallel_size` above 1",
        megatron="NotImplementedError",
        ours="error",
        why="as above",
        within=_mhc_and_pipeline,
    ),
    Rule(
        name="mhc-and-mtp",
        when="`enable_mhc_connections` with `mtp_num_layers`",
        megatron="ValueError",
        ours="error",
        why="as above",
        within=_mhc_and_mtp,
    ),
    Rule(
        name="mhc-layer-indices",
        when="hyper-connections with the outputs of chosen layers asked for",
        megatron="NotImplementedError at run time",
        ours="not yet",
        why="no model here has hyper-connections",
    ),
    Rule(
        name="gdp-range",
        when="`gdp_num_chunk_states_to_recompute` outside 0 to 64",
        megatron="AssertionError if `gdp_cutedsl_kernel`, else nothing",
        ours="error",
        why="meaningless",
        alone=_gdp_range,
    ),
    Rule(
        name="expert-overlap",
        when="`overlap_moe_expert_parallel_comm` with `full`, a method, a number of layers, or `moe`",
        megatron="AssertionError",
        ours="error",
        why="nothing here can show yet that it works",
        within=_overlap,
    ),
    Rule(
        name="expert-overlap-offload",
        when="`overlap_moe_expert_parallel_comm` on `ncclep` with offload of `expert_fc1`",
        megatron="AssertionError",
        ours="error",
        why="what would be offloaded is freed",
        within=_overlap_offload,
    ),
    Rule(
        name="mtp-uniform",
        when="`mtp_num_layers` with `full`, `uniform` and a number above 1",
        megatron="AssertionError",
        ours="free",
        why="each of these layers is a region of its own, whatever the number",
    ),
    Rule(
        name="mtp-block",
        when="`mtp_num_layers` with `full` and `block`",
        megatron="warning; these layers are not recomputed",
        ours="warning",
        why="the same",
        within=_mtp_block,
    ),
)
