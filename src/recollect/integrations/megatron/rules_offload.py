"""Rules about offloading whole layers, or the inputs of modules.

recollect offloads nothing yet. Settings that are wrong in any engine are errors anyway; so are those that only Megatron's
engine cannot do, until something here shows that they work.
"""

from __future__ import annotations

import os

from recollect.integrations.megatron.modules import OFFLOAD_MODULES
from recollect.integrations.megatron.recompute_settings import RecomputeSettings
from recollect.integrations.megatron.rule import Clash, Rule
from recollect.integrations.megatron.rules_stash import EXPERT_PARTS, offloaded
from recollect.integrations.megatron.training_setting import TrainingSetting

__all__ = ["OFFLOAD_RULES", "version_of"]


def version_of(text: str | None) -> tuple[int, int]:
    """Return the major and minor version; (0, 0) if not installed."""
    parts = [int(digits) for part in (text or "").split(".")[:2] if (digits := "".join(filter(str.isdigit, part)))]
    return (parts[0], parts[1]) if len(parts) == 2 else (0, 0)


def _every_layer(config: RecomputeSettings, setting: TrainingSetting) -> list[int]:
    if not config.cpu_offloading or setting.num_layers is None:
        return []
    return [setting.num_layers - 1] if config.cpu_offloading_num_layers >= setting.num_layers else []


def _offloads(config: RecomputeSettings, module: str) -> bool:
    return config.fine_grained_activation_offloading and module in config.offload_modules


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


_LAYERS = ("cpu_offloading", "cpu_offloading_num_layers")
_LATER = "nothing here can show yet that it works; the tape has no such limit"

OFFLOAD_RULES = (
    Rule(
        name="offload-num-layers",
        when="`cpu_offloading` with `cpu_offloading_num_layers` not below `num_layers`",
        megatron="ValueError",
        why="the last layer's values are needed at once",
        within=_every_layer,
        settings=("cpu_offloading_num_layers", "num_layers"),
        reason="all layers cannot be offloaded: the last one is needed at once",
        advice="Set cpu_offloading_num_layers to {} or less.",
    ),
    Rule(
        name="offload-num-layers-type",
        when="`cpu_offloading_num_layers` negative or not a whole number",
        megatron="ValueError for negative numbers if `cpu_offloading`, else nothing",
        why="meaningless",
        alone=lambda config: type(config.cpu_offloading_num_layers) is not int or config.cpu_offloading_num_layers < 0,
        settings=("cpu_offloading_num_layers",),
        reason="not a number of layers",
        advice="Set it to a whole number, 0 or more.",
    ),
    Rule(
        name="offload-no-layers",
        when="`cpu_offloading` with no layers",
        megatron="nothing; Bridge's harness did so by accident (issue 2992)",
        ours="warning",
        why="it has no effect",
        alone=lambda config: config.cpu_offloading and config.cpu_offloading_num_layers == 0,
        settings=_LAYERS,
        reason="no layer is offloaded",
        advice="Set cpu_offloading_num_layers, or leave out cpu_offloading.",
    ),
    Rule(
        name="offload-layers-without-switch",
        when="`cpu_offloading_num_layers` without `cpu_offloading`",
        megatron="nothing in the configuration object; its command line sets `cpu_offloading`",
        ours="warning",
        why="it has no effect; `recollect train` sets it too",
        alone=lambda config: not config.cpu_offloading and config.cpu_offloading_num_layers != 0,
        settings=_LAYERS,
        reason="nothing is offloaded",
        advice="Set cpu_offloading, or leave out cpu_offloading_num_layers.",
    ),
    Rule(
        name="offload-pipeline",
        when="`cpu_offloading` with `pipeline_model_parallel_size` above 1",
        megatron="ValueError",
        why=_LATER,
        within=lambda config, setting: config.cpu_offloading and setting.pipeline_model_parallel_size != 1,
        settings=("cpu_offloading", "pipeline_model_parallel_size"),
        reason="whole layers are offloaded in the order of one forward and one backward",
        advice="Leave out cpu_offloading, or set pipeline_model_parallel_size to 1.",
    ),
    Rule(
        name="offload-and-recompute",
        when="`cpu_offloading` with any recompute",
        megatron="ValueError",
        why=_LATER,
        alone=lambda config: config.cpu_offloading and (config.recompute_granularity or config.is_selective),
        settings=("cpu_offloading", "recompute_granularity", "moe_layer_recompute"),
        reason="one brings back what the other drops",
        advice="Leave out one of them.",
    ),
    Rule(
        name="fine-grained-and-layers",
        when="`fine_grained_activation_offloading` with `cpu_offloading`",
        megatron="AssertionError",
        why="both would take the same values",
        alone=lambda config: config.fine_grained_activation_offloading and config.cpu_offloading,
        settings=("fine_grained_activation_offloading", "cpu_offloading"),
        reason="both would offload the same values",
        advice="Leave out one of them.",
    ),
    Rule(
        name="offload-modules-empty",
        when="`fine_grained_activation_offloading` without `offload_modules`",
        megatron="AssertionError without a message",
        why="it would have no effect",
        alone=lambda config: config.fine_grained_activation_offloading and not config.offload_modules,
        settings=("fine_grained_activation_offloading", "offload_modules"),
        reason="nothing to offload is named",
        advice=f"Set offload_modules to some of {', '.join(OFFLOAD_MODULES)}.",
    ),
    Rule(
        name="offload-modules-known",
        when="an unknown name in `offload_modules`",
        megatron="AssertionError if `fine_grained_activation_offloading`, else nothing",
        why="recollect suggests the closest name",
        alone=lambda config: [name for name in config.offload_modules if name not in OFFLOAD_MODULES],
        settings=("offload_modules",),
        reason="nothing is called {!r}",
        advice=f"Choose from {', '.join(OFFLOAD_MODULES)}.",
        known=OFFLOAD_MODULES,
    ),
    Rule(
        name="offload-modules-without-switch",
        when="`offload_modules` without `fine_grained_activation_offloading`",
        megatron="nothing; they are ignored",
        ours="warning",
        why="it has no effect",
        alone=lambda config: not config.fine_grained_activation_offloading and config.offload_modules,
        settings=("fine_grained_activation_offloading", "offload_modules"),
        reason="nothing is offloaded",
        advice="Set fine_grained_activation_offloading, or leave out offload_modules.",
    ),
    Rule(
        name="offload-attn-proj",
        when="offload of `attn_proj` without `core_attn`",
        megatron="ValueError",
        why="its input would stay on the device anyway",
        alone=lambda config: _offloads(config, "attn_proj") and "core_attn" not in config.offload_modules,
        settings=("offload_modules",),
        reason="the input of attn_proj is the output of core_attn, which core_attn's backward holds",
        advice="Add core_attn.",
    ),
    Rule(
        name="offload-gdp-qkv",
        when="offload of `gdp_qkv` with recompute of `gdp_in_proj`",
        megatron="ValueError",
        why="nothing is left to offload",
        alone=lambda config: "gdp_qkv" in config.offload_modules and "gdp_in_proj" in config.modules,
        settings=("offload_modules", "modules"),
        reason="recompute of gdp_in_proj drops what gdp_qkv would offload",
        advice="Leave out one of them.",
    ),
    Rule(
        name="offload-inside-moe",
        when="offload of `moe_act`, `expert_fc1` or `fused_group_mlp` with recompute of `moe`",
        megatron="AssertionError",
        why="nothing is left to offload",
        alone=lambda config: (
            config.fine_grained_activation_offloading and "moe" in config.modules and offloaded(config, *EXPERT_PARTS)
        ),
        settings=("offload_modules", "modules"),
        reason="recompute of moe drops what {} would offload",
        advice="Leave out one of them.",
    ),
    Rule(
        name="offload-numbers",
        when="a negative size, or a fraction outside 0 to 1, among the companions of `offload_modules`",
        megatron="AssertionError if `fine_grained_activation_offloading`; `..._max_inflight_offloads` with graphs only",
        why="meaningless",
        alone=_numbers,
    ),
    Rule(
        name="offload-fused-needs-fuser",
        when="offload of `fused_group_mlp` without `use_transformer_engine_op_fuser`",
        megatron="ValueError",
        why="the model has no such module",
        within=lambda config, setting: (
            _offloads(config, "fused_group_mlp") and not setting.use_transformer_engine_op_fuser
        ),
        settings=("offload_modules", "use_transformer_engine_op_fuser"),
        reason="there is no fused MLP of experts",
        advice="Set use_transformer_engine_op_fuser, or offload expert_fc1 and moe_act instead.",
    ),
    Rule(
        name="offload-fused-or-parts",
        when="offload of `fused_group_mlp` with `expert_fc1` or `moe_act`",
        megatron="ValueError",
        why="they name the same values",
        alone=lambda config: _offloads(config, "fused_group_mlp") and offloaded(config, "expert_fc1", "moe_act"),
        settings=("offload_modules",),
        reason="fused_group_mlp includes the others",
        advice="Leave out {}, or fused_group_mlp.",
    ),
    Rule(
        name="offload-transformer-engine",
        when="`fine_grained_activation_offloading` with another `transformer_impl`",
        megatron="AssertionError on the command line",
        why=_LATER,
        within=lambda config, setting: (
            config.fine_grained_activation_offloading and setting.transformer_impl != "transformer_engine"
        ),
        settings=("fine_grained_activation_offloading", "transformer_impl"),
        reason="modules are offloaded only in Transformer Engine's layers",
        advice="Set transformer_impl to 'transformer_engine'.",
    ),
    Rule(
        name="offload-v1",
        when="`fine_grained_activation_offloading` on Transformer Engine 2.10 without NVTE_CPU_OFFLOAD_V1=1",
        megatron="AssertionError on the command line",
        why="a limit of that library",
        within=lambda config, setting: (
            config.fine_grained_activation_offloading
            and version_of(setting.transformer_engine_version) >= (2, 10)
            and os.environ.get("NVTE_CPU_OFFLOAD_V1") != "1"
        ),
        settings=("fine_grained_activation_offloading", "transformer_engine_version"),
        reason="from 2.10 on, this needs the older of its two offload paths",
        advice="Set the environment variable NVTE_CPU_OFFLOAD_V1 to 1.",
    ),
)
