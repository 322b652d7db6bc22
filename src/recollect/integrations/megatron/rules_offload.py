"""Rules about offloading whole layers, the inputs of modules, or experts' activations in pages of tokens (a paged stash).

recollect offloads nothing yet. Settings that are wrong in any engine are errors anyway; so are those that only Megatron's
engine cannot do, until something here shows that they work.
"""

from __future__ import annotations

import os

from recollect.integrations.megatron.choice import OFFLOAD_MODULES
from recollect.integrations.megatron.condition import (
    OFF,
    ON,
    SEVERAL_RANKS,
    UNSET,
    Broken,
    Condition,
    below,
    has,
    other_than,
    version_of,
)
from recollect.integrations.megatron.recompute_settings import RecomputeSettings
from recollect.integrations.megatron.rule import Clash, Rule
from recollect.integrations.megatron.training_setting import TrainingSetting

__all__ = ["OFFLOAD_RULES"]

_EXPERT_PARTS = ("moe_act", "expert_fc1", "fused_group_mlp")


def _every_layer(config: RecomputeSettings, setting: TrainingSetting) -> list[int]:
    if not config.cpu_offloading or setting.num_layers is None:
        return []
    return [setting.num_layers - 1] if config.cpu_offloading_num_layers >= setting.num_layers else []


def _offloads(config: RecomputeSettings, *modules: str) -> Broken:
    return config.fine_grained_activation_offloading and has(*modules).holds(config.offload_modules)


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


_NEEDS_OLDER_PATH = Condition(
    lambda version: version_of(version) >= (2, 10) and os.environ.get("NVTE_CPU_OFFLOAD_V1") != "1",
    "`{}` 2.10 or later, and not NVTE_CPU_OFFLOAD_V1=1",
)
_LATER = "nothing here can show yet that it works; the tape has no such limit"

OFFLOAD_RULES = {
    "offload-num-layers": Rule(
        when="`cpu_offloading` with `cpu_offloading_num_layers` not below `num_layers`",
        within=_every_layer,
        settings=("cpu_offloading_num_layers", "num_layers"),
        reason="all layers cannot be offloaded: the last one is needed at once",
        advice="Set cpu_offloading_num_layers to {} or less.",
    ),
    "offload-num-layers-type": Rule(
        when="`cpu_offloading_num_layers` negative or not a whole number",
        megatron="ValueError for negative numbers if `cpu_offloading`, else nothing",
        breaks={"cpu_offloading_num_layers": below(0)},
        reason="not a number of layers",
        advice="Set it to a whole number, 0 or more.",
    ),
    "offload-no-layers": Rule(
        megatron="nothing; Bridge's harness did so by accident (issue 2992)",
        ours="warning",
        breaks={"cpu_offloading": ON, "cpu_offloading_num_layers": OFF},
        reason="no layer is offloaded",
        advice="Set cpu_offloading_num_layers, or leave out cpu_offloading.",
    ),
    "offload-layers-without-switch": Rule(
        megatron="nothing in the configuration object; its command line sets `cpu_offloading`",
        ours="warning",
        why="it has no effect; `recollect train` sets it too",
        breaks={"cpu_offloading": OFF, "cpu_offloading_num_layers": ON},
        reason="nothing is offloaded",
        advice="Set cpu_offloading, or leave out cpu_offloading_num_layers.",
    ),
    "offload-pipeline": Rule(
        why=_LATER,
        breaks={"cpu_offloading": ON, "pipeline_model_parallel_size": SEVERAL_RANKS},
        reason="whole layers are offloaded in the order of one forward and one backward",
        advice="Leave out cpu_offloading, or set pipeline_model_parallel_size to 1.",
    ),
    "offload-and-recompute": Rule(
        when="`cpu_offloading` with any recompute",
        why=_LATER,
        alone=lambda config: config.cpu_offloading and (config.recompute_granularity or config.is_selective),
        settings=("cpu_offloading", "recompute_granularity", "moe_layer_recompute"),
        reason="one brings back what the other drops",
    ),
    "fine-grained-and-layers": Rule(
        megatron="AssertionError",
        breaks={"fine_grained_activation_offloading": ON, "cpu_offloading": ON},
        reason="both would offload the same values",
    ),
    "offload-modules-empty": Rule(
        megatron="AssertionError without a message",
        breaks={"fine_grained_activation_offloading": ON, "offload_modules": OFF},
        reason="nothing to offload is named",
        advice=f"Set offload_modules to some of {', '.join(OFFLOAD_MODULES)}.",
    ),
    "offload-modules-known": Rule(
        when="an unknown name in `offload_modules`",
        megatron="AssertionError if `fine_grained_activation_offloading`, else nothing",
        why="recollect suggests the closest name",
        alone=lambda config: [name for name in config.offload_modules if name not in OFFLOAD_MODULES],
        settings=("offload_modules",),
        reason="nothing is called {!r}",
        advice=f"Choose from {', '.join(OFFLOAD_MODULES)}.",
        known=OFFLOAD_MODULES,
    ),
    "offload-modules-without-switch": Rule(
        megatron="nothing; they are ignored",
        ours="warning",
        breaks={"fine_grained_activation_offloading": OFF, "offload_modules": ON},
        reason="nothing is offloaded",
        advice="Set fine_grained_activation_offloading, or leave out offload_modules.",
    ),
    "offload-attn-proj": Rule(
        when="offload of `attn_proj` without `core_attn`",
        alone=lambda config: _offloads(config, "attn_proj") and "core_attn" not in config.offload_modules,
        settings=("offload_modules",),
        reason="the input of attn_proj is the output of core_attn, which core_attn's backward holds",
        advice="Add core_attn.",
    ),
    "offload-gdp-qkv": Rule(
        when="offload of `gdp_qkv` with recompute of `gdp_in_proj`",
        breaks={"offload_modules": has("gdp_qkv"), "modules": has("gdp_in_proj")},
        reason="recompute of gdp_in_proj drops what gdp_qkv would offload",
    ),
    "offload-inside-moe": Rule(
        when="offload of `moe_act`, `expert_fc1` or `fused_group_mlp` with recompute of `moe`",
        megatron="AssertionError",
        why="nothing is left to offload",
        alone=lambda config: "moe" in config.modules and _offloads(config, *_EXPERT_PARTS),
        settings=("offload_modules", "modules"),
        reason="recompute of moe drops what {} would offload",
    ),
    "offload-numbers": Rule(
        when="a negative size, or a fraction outside 0 to 1, among the companions of `offload_modules`",
        megatron="AssertionError if `fine_grained_activation_offloading`; `..._max_inflight_offloads` with graphs only",
        why="meaningless",
        alone=_numbers,
    ),
    "offload-fused-needs-fuser": Rule(
        when="offload of `fused_group_mlp` without `use_transformer_engine_op_fuser`",
        within=lambda config, setting: (
            _offloads(config, "fused_group_mlp") and not setting.use_transformer_engine_op_fuser
        ),
        settings=("offload_modules", "use_transformer_engine_op_fuser"),
        reason="there is no fused MLP of experts",
        advice="Set use_transformer_engine_op_fuser, or offload expert_fc1 and moe_act instead.",
    ),
    "offload-fused-or-parts": Rule(
        when="offload of `fused_group_mlp` with `expert_fc1` or `moe_act`",
        alone=lambda config: _offloads(config, "fused_group_mlp") and _offloads(config, "expert_fc1", "moe_act"),
        settings=("offload_modules",),
        reason="fused_group_mlp includes the others",
        advice="Leave out {}, or fused_group_mlp.",
    ),
    "offload-transformer-engine": Rule(
        when="`fine_grained_activation_offloading` with another `transformer_impl`",
        megatron="AssertionError on the command line",
        why=_LATER,
        breaks={"fine_grained_activation_offloading": ON, "transformer_impl": other_than("transformer_engine")},
        reason="modules are offloaded only in Transformer Engine's layers",
        advice="Set transformer_impl to 'transformer_engine'.",
    ),
    "offload-v1": Rule(
        megatron="AssertionError on the command line",
        breaks={"fine_grained_activation_offloading": ON, "transformer_engine_version": _NEEDS_OLDER_PATH},
        reason="from 2.10 on, this needs the older of its two offload paths",
        advice="Set the environment variable NVTE_CPU_OFFLOAD_V1 to 1.",
    ),
    # A paged stash.
    "stash-and-layers": Rule(
        reason="both would take the same values",
        breaks={"moe_paged_stash": ON, "cpu_offloading": ON},
    ),
    "stash-needs-capacity": Rule(
        breaks={"moe_paged_stash": ON, "moe_expert_rank_capacity_factor": UNSET},
        reason="without a capacity there is nothing to page",
        advice="Set moe_expert_rank_capacity_factor, or leave out moe_paged_stash.",
    ),
    "stash-or-offload": Rule(
        when="`moe_paged_stash` with offload of `expert_fc1`, `moe_act` or `fused_group_mlp`",
        breaks={"moe_paged_stash": ON, "offload_modules": has(*_EXPERT_PARTS)},
        reason="the stash holds these activations already",
        advice="Leave out {}.",
    ),
}
