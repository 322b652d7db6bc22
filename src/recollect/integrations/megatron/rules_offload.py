"""Rules about offloading whole layers, or the inputs of modules.

recollect offloads nothing yet. Settings that are wrong in any engine are errors anyway; so are those that only Megatron's
engine cannot do, until something here shows that they work.
"""

from __future__ import annotations

import os

from recollect.integrations.megatron.modules import OFFLOAD_MODULES
from recollect.integrations.megatron.recompute_settings import RecomputeSettings
from recollect.integrations.megatron.rule import Clash, Rule, did_you_mean, found
from recollect.integrations.megatron.rules_stash import offloaded_inside_moe
from recollect.integrations.megatron.training_setting import TrainingSetting

__all__ = ["OFFLOAD_RULES", "version_of"]


def version_of(text: str | None) -> tuple[int, int]:
    """Return the major and minor version; (0, 0) if not installed."""
    parts = [int(digits) for part in (text or "").split(".")[:2] if (digits := "".join(filter(str.isdigit, part)))]
    return (parts[0], parts[1]) if len(parts) == 2 else (0, 0)


def _num_layers(config: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    num_layers, value = setting.num_layers, config.cpu_offloading_num_layers
    if not config.cpu_offloading or num_layers is None or value < num_layers:
        return None
    return Clash(
        {**found(config, "cpu_offloading_num_layers"), "num_layers": num_layers},
        "all layers cannot be offloaded: the last one is needed at once",
        f"Set cpu_offloading_num_layers to {num_layers - 1} or less.",
    )


def _num_layers_type(config: RecomputeSettings) -> Clash | None:
    value = config.cpu_offloading_num_layers
    if type(value) is int and value >= 0:
        return None
    return Clash(
        found(config, "cpu_offloading_num_layers"), "not a number of layers", "Set it to a whole number, 0 or more."
    )


def _no_layers(config: RecomputeSettings) -> Clash | None:
    if not config.cpu_offloading or config.cpu_offloading_num_layers != 0:
        return None
    return Clash(
        found(config, "cpu_offloading", "cpu_offloading_num_layers"),
        "no layer is offloaded",
        "Set cpu_offloading_num_layers, or leave out cpu_offloading.",
    )


def _layers_without_switch(config: RecomputeSettings) -> Clash | None:
    if config.cpu_offloading or config.cpu_offloading_num_layers == 0:
        return None
    return Clash(
        found(config, "cpu_offloading", "cpu_offloading_num_layers"),
        "nothing is offloaded",
        "Set cpu_offloading, or leave out cpu_offloading_num_layers.",
    )


def _pipeline(config: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    if not config.cpu_offloading or setting.pipeline_model_parallel_size == 1:
        return None
    return Clash(
        {**found(config, "cpu_offloading"), **found(setting, "pipeline_model_parallel_size")},
        "whole layers are offloaded in the order of one forward and one backward",
        "Leave out cpu_offloading, or set pipeline_model_parallel_size to 1.",
    )


def _layers_and_recompute(config: RecomputeSettings) -> Clash | None:
    if not config.cpu_offloading or not (config.recompute_granularity or config.is_selective):
        return None
    return Clash(
        found(config, "cpu_offloading", "recompute_granularity", "moe_layer_recompute"),
        "one brings back what the other drops",
        "Leave out one of them.",
    )


def _fine_and_layers(config: RecomputeSettings) -> Clash | None:
    if not (config.fine_grained_activation_offloading and config.cpu_offloading):
        return None
    return Clash(
        found(config, "fine_grained_activation_offloading", "cpu_offloading"),
        "both would offload the same values",
        "Leave out one of them.",
    )


def _names_no_module(config: RecomputeSettings) -> Clash | None:
    if not config.fine_grained_activation_offloading or config.offload_modules:
        return None
    return Clash(
        found(config, "fine_grained_activation_offloading", "offload_modules"),
        "nothing to offload is named",
        f"Set offload_modules to some of {', '.join(OFFLOAD_MODULES)}.",
    )


def _known(config: RecomputeSettings) -> Clash | None:
    unknown = [name for name in config.offload_modules if name not in OFFLOAD_MODULES]
    if not unknown:
        return None
    advice = f"{did_you_mean(unknown[0], OFFLOAD_MODULES)}Choose from {', '.join(OFFLOAD_MODULES)}."
    return Clash(found(config, "offload_modules"), f"nothing is called {unknown[0]!r}", advice)


def _not_on(config: RecomputeSettings) -> Clash | None:
    if config.fine_grained_activation_offloading or not config.offload_modules:
        return None
    return Clash(
        found(config, "fine_grained_activation_offloading", "offload_modules"),
        "nothing is offloaded",
        "Set fine_grained_activation_offloading, or leave out offload_modules.",
    )


def _attn_proj(config: RecomputeSettings) -> Clash | None:
    modules = config.offload_modules
    if not config.fine_grained_activation_offloading or "attn_proj" not in modules or "core_attn" in modules:
        return None
    return Clash(
        found(config, "offload_modules"),
        "the input of attn_proj is the output of core_attn, which core_attn's backward holds",
        "Add core_attn.",
    )


def _gdp(config: RecomputeSettings) -> Clash | None:
    if "gdp_qkv" not in config.offload_modules or "gdp_in_proj" not in config.modules:
        return None
    return Clash(
        {**found(config, "offload_modules"), "recompute_modules": config.modules},
        "recompute of gdp_in_proj drops what gdp_qkv would offload",
        "Leave out one of them.",
    )


def _inside_moe(config: RecomputeSettings) -> Clash | None:
    inside = offloaded_inside_moe(config)
    if not config.fine_grained_activation_offloading or "moe" not in config.modules or not inside:
        return None
    return Clash(
        {**found(config, "offload_modules"), "recompute_modules": config.modules},
        f"recompute of moe drops what {' and '.join(inside)} would offload",
        "Leave out one of them.",
    )


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


def _fused_needs_fuser(config: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    if not config.fine_grained_activation_offloading or "fused_group_mlp" not in config.offload_modules:
        return None
    if setting.use_transformer_engine_op_fuser:
        return None
    return Clash(
        {**found(config, "offload_modules"), **found(setting, "use_transformer_engine_op_fuser")},
        "there is no fused MLP of experts",
        "Set use_transformer_engine_op_fuser, or offload expert_fc1 and moe_act instead.",
    )


def _fused_or_parts(config: RecomputeSettings) -> Clash | None:
    parts = [name for name in ("expert_fc1", "moe_act") if name in config.offload_modules]
    if not config.fine_grained_activation_offloading or "fused_group_mlp" not in config.offload_modules or not parts:
        return None
    return Clash(
        found(config, "offload_modules"),
        "fused_group_mlp includes the others",
        f"Leave out {' and '.join(parts)}, or fused_group_mlp.",
    )


def _transformer_engine(config: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    if not config.fine_grained_activation_offloading or setting.transformer_impl == "transformer_engine":
        return None
    return Clash(
        {**found(config, "fine_grained_activation_offloading"), **found(setting, "transformer_impl")},
        "modules are offloaded only in Transformer Engine's layers",
        "Set transformer_impl to 'transformer_engine'.",
    )


def _version_1(config: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    version = setting.transformer_engine_version
    if not config.fine_grained_activation_offloading or version_of(version) < (2, 10):
        return None
    if os.environ.get("NVTE_CPU_OFFLOAD_V1") == "1":
        return None
    return Clash(
        {**found(config, "fine_grained_activation_offloading"), "transformer_engine_version": version},
        "from 2.10 on, this needs the older of its two offload paths",
        "Set the environment variable NVTE_CPU_OFFLOAD_V1 to 1.",
    )


_LATER = "nothing here can show yet that it works; the tape has no such limit"

OFFLOAD_RULES = (
    Rule(
        name="offload-num-layers",
        when="`cpu_offloading` with `cpu_offloading_num_layers` not below `num_layers`",
        megatron="ValueError",
        ours="error",
        why="the last layer's values are needed at once",
        within=_num_layers,
    ),
    Rule(
        name="offload-num-layers-type",
        when="`cpu_offloading_num_layers` negative or not a whole number",
        megatron="ValueError for negative numbers if `cpu_offloading`, else nothing",
        ours="error",
        why="meaningless",
        alone=_num_layers_type,
    ),
    Rule(
        name="offload-no-layers",
        when="`cpu_offloading` with no layers",
        megatron="nothing; Bridge's harness did so by accident (issue 2992)",
        ours="warning",
        why="it has no effect",
        alone=_no_layers,
    ),
    Rule(
        name="offload-layers-without-switch",
        when="`cpu_offloading_num_layers` without `cpu_offloading`",
        megatron="nothing in the configuration object; its command line sets `cpu_offloading`",
        ours="warning",
        why="it has no effect; `recollect train` sets it too",
        alone=_layers_without_switch,
    ),
    Rule(
        name="offload-pipeline",
        when="`cpu_offloading` with `pipeline_model_parallel_size` above 1",
        megatron="ValueError",
        ours="error",
        why=_LATER,
        within=_pipeline,
    ),
    Rule(
        name="offload-and-recompute",
        when="`cpu_offloading` with any recompute",
        megatron="ValueError",
        ours="error",
        why=_LATER,
        alone=_layers_and_recompute,
    ),
    Rule(
        name="fine-grained-and-layers",
        when="`fine_grained_activation_offloading` with `cpu_offloading`",
        megatron="AssertionError",
        ours="error",
        why="both would take the same values",
        alone=_fine_and_layers,
    ),
    Rule(
        name="offload-modules-empty",
        when="`fine_grained_activation_offloading` without `offload_modules`",
        megatron="AssertionError without a message",
        ours="error",
        why="it would have no effect",
        alone=_names_no_module,
    ),
    Rule(
        name="offload-modules-known",
        when="an unknown name in `offload_modules`",
        megatron="AssertionError if `fine_grained_activation_offloading`, else nothing",
        ours="error",
        why="recollect suggests the closest name",
        alone=_known,
    ),
    Rule(
        name="offload-modules-without-switch",
        when="`offload_modules` without `fine_grained_activation_offloading`",
        megatron="nothing; they are ignored",
        ours="warning",
        why="it has no effect",
        alone=_not_on,
    ),
    Rule(
        name="offload-attn-proj",
        when="offload of `attn_proj` without `core_attn`",
        megatron="ValueError",
        ours="error",
        why="its input would stay on the device anyway",
        alone=_attn_proj,
    ),
    Rule(
        name="offload-gdp-qkv",
        when="offload of `gdp_qkv` with recompute of `gdp_in_proj`",
        megatron="ValueError",
        ours="error",
        why="nothing is left to offload",
        alone=_gdp,
    ),
    Rule(
        name="offload-inside-moe",
        when="offload of `moe_act`, `expert_fc1` or `fused_group_mlp` with recompute of `moe`",
        megatron="AssertionError",
        ours="error",
        why="nothing is left to offload",
        alone=_inside_moe,
    ),
    Rule(
        name="offload-numbers",
        when="a negative size, or a fraction outside 0 to 1, among the companions of `offload_modules`",
        megatron="AssertionError if `fine_grained_activation_offloading`; `..._max_inflight_offloads` with graphs only",
        ours="error",
        why="meaningless",
        alone=_numbers,
    ),
    Rule(
        name="offload-fused-needs-fuser",
        when="offload of `fused_group_mlp` without `use_transformer_engine_op_fuser`",
        megatron="ValueError",
        ours="error",
        why="the model has no such module",
        within=_fused_needs_fuser,
    ),
    Rule(
        name="offload-fused-or-parts",
        when="offload of `fused_group_mlp` with `expert_fc1` or `moe_act`",
        megatron="ValueError",
        ours="error",
        why="they name the same values",
        alone=_fused_or_parts,
    ),
    Rule(
        name="offload-transformer-engine",
        when="`fine_grained_activation_offloading` with another `transformer_impl`",
        megatron="AssertionError on the command line",
        ours="error",
        why=_LATER,
        within=_transformer_engine,
    ),
    Rule(
        name="offload-v1",
        when="`fine_grained_activation_offloading` on Transformer Engine 2.10 without NVTE_CPU_OFFLOAD_V1=1",
        megatron="AssertionError on the command line",
        ours="error",
        why="a limit of that library",
        within=_version_1,
    ),
)
