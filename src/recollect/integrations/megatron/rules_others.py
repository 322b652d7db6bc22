"""Rules about 8-bit precision, hyper-connections, delta nets, expert overlap, and multi-token prediction."""

from __future__ import annotations

from recollect.integrations.megatron.condition import OFF, ON, SET, SEVERAL_RANKS, before, below, has, one_of
from recollect.integrations.megatron.recompute_settings import RecomputeSettings
from recollect.integrations.megatron.rule import Clash, Rule, found
from recollect.integrations.megatron.training_setting import TrainingSetting

__all__ = ["OTHER_RULES", "mtp_block_clash"]

_8_BIT_SENSITIVE = has("moe_act", "layernorm")


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


OTHER_RULES = {
    "fp8-delayed": Rule(
        when="`fp8` by the recipe `delayed` with `moe_act` or `layernorm`",
        breaks={"modules": _8_BIT_SENSITIVE, "fp8": SET, "fp8_recipe": one_of("delayed")},
        reason="delayed scaling records what it sees, and recompute would show it everything twice",
        advice="Choose another fp8_recipe, or leave out moe_act and layernorm.",
    ),
    "fp8-version": Rule(
        when="`fp8` with `moe_act` or `layernorm` on a Transformer Engine before 2.6",
        breaks={"modules": _8_BIT_SENSITIVE, "fp8": SET, "transformer_engine_version": before(2, 6)},
        reason="the layer after them has to keep its input in 16 bits, which Transformer Engine supports from 2.6 on",
        advice="Update it, or leave out moe_act and layernorm.",
    ),
    "fp8-absorbed-mla": Rule(
        when="`fp8` or `fp4` with `mla_up_proj` in an absorbed latent attention",
        megatron="AssertionError when the model is built",
        ours="not yet",
        why="nor are `fp8` and `fp4`",
    ),
    "mhc-needs-mhc": Rule(
        breaks={"modules": has("mhc"), "enable_mhc_connections": OFF},
        reason="there are no hyper-connections",
        advice="Leave out mhc, or set enable_mhc_connections.",
    ),
    "mhc-and-mlp": Rule(
        when="`mhc` with `mlp`",
        why="no model here has hyper-connections to try it on",
        alone=lambda config: "mhc" in config.modules and "mlp" in config.modules,
        settings=("modules",),
        reason="mhc recomputes around the mlp",
    ),
    "mhc-num-layers": Rule(
        breaks={"modules": has("mhc"), "mhc_recompute_layer_num": below(1)},
        settings=("mhc_recompute_layer_num",),
        reason="not a number of layers",
        advice="Set it to 1 or more, or None for all.",
    ),
    "mhc-and-offload": Rule(
        megatron="NotImplementedError",
        why="no model here has hyper-connections to try it on",
        breaks={"modules": has("mhc"), "fine_grained_activation_offloading": ON},
        reason="mhc would be recomputed before its inputs are back",
    ),
    "mhc-without-recompute": Rule(
        when="`enable_mhc_connections` without recompute of `mhc`",
        megatron="warning",
        ours="warning",
        within=lambda config, setting: (
            setting.enable_mhc_connections and "mhc" not in config.modules and config.recompute_granularity != "full"
        ),
        settings=("enable_mhc_connections", "modules"),
        reason="hyper-connections keep several residual streams per layer",
        advice="Consider recompute_modules with mhc.",
    ),
    "mhc-and-full": Rule(
        megatron="NotImplementedError",
        reason="no model here has hyper-connections to try it on",
        breaks={"enable_mhc_connections": ON, "recompute_granularity": one_of("full")},
        advice="Set recompute_granularity to 'selective' with mhc.",
    ),
    "mhc-and-pipeline": Rule(
        megatron="NotImplementedError",
        why="as above",
        breaks={"enable_mhc_connections": ON, "pipeline_model_parallel_size": SEVERAL_RANKS},
        reason="stages would pass on several residual streams",
        advice="Set pipeline_model_parallel_size to 1.",
    ),
    "mhc-and-mtp": Rule(
        why="as above",
        breaks={"enable_mhc_connections": ON, "mtp_num_layers": SET},
        reason="multi-token prediction layers expect one residual stream",
    ),
    "mhc-layer-indices": Rule(
        when="hyper-connections with the outputs of chosen layers asked for",
        megatron="NotImplementedError at run time",
        ours="not yet",
        why="no model here has hyper-connections",
    ),
    "gdp-range": Rule(
        when="`gdp_num_chunk_states_to_recompute` outside 0 to 64",
        megatron="AssertionError if `gdp_cutedsl_kernel`, else nothing",
        alone=lambda config: not 0 <= config.gdp_num_chunk_states_to_recompute <= 64,
        settings=("gdp_num_chunk_states_to_recompute",),
        reason="out of range",
        advice="Set it to 0 to 64.",
    ),
    "expert-overlap": Rule(
        when="`overlap_moe_expert_parallel_comm` with `full`, a method, a number of layers, or `moe`",
        megatron="AssertionError",
        why="nothing here can show yet that it works",
        within=_overlap,
    ),
    "expert-overlap-offload": Rule(
        when="`overlap_moe_expert_parallel_comm` on `ncclep` with offload of `expert_fc1`",
        megatron="AssertionError",
        within=lambda config, setting: (
            setting.overlap_moe_expert_parallel_comm
            and (setting.moe_token_dispatcher_type, setting.moe_flex_dispatcher_backend) == ("flex", "ncclep")
            and "expert_fc1" in config.offload_modules
        ),
        settings=("offload_modules", "moe_flex_dispatcher_backend"),
        reason="the input of expert_fc1 is freed early on this path",
        advice="Leave out expert_fc1.",
    ),
    "mtp-uniform": Rule(
        when="`mtp_num_layers` with `full`, `uniform` and a number above 1",
        megatron="AssertionError",
        ours="free",
        why="each of these layers is a region of its own, whatever the number",
    ),
    "mtp-block": Rule(
        when="`mtp_num_layers` with `full` and `block`",
        megatron="warning; these layers are not recomputed",
        ours="warning",
        why="the same",
        within=_mtp_block,
    ),
}
