"""Rules about a paged stash: experts' activations in pages of tokens, on the device or the host."""

from __future__ import annotations

from recollect.integrations.megatron.recompute_settings import RecomputeSettings
from recollect.integrations.megatron.rule import Clash, Rule, found
from recollect.integrations.megatron.training_setting import TrainingSetting

__all__ = ["STASH_RULES", "offloaded_inside_moe"]


def offloaded_inside_moe(config: RecomputeSettings) -> tuple[str, ...]:
    """Return the offloaded modules of the experts."""
    return tuple(name for name in ("moe_act", "expert_fc1", "fused_group_mlp") if name in config.offload_modules)


def _stash_and_layers(config: RecomputeSettings) -> Clash | None:
    if not (config.moe_paged_stash and config.cpu_offloading):
        return None
    return Clash(
        found(config, "moe_paged_stash", "cpu_offloading"), "both would take the same values", "Leave out one of them."
    )


def _stash_needs_capacity(config: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    if not config.moe_paged_stash or setting.moe_expert_rank_capacity_factor is not None:
        return None
    return Clash(
        {**found(config, "moe_paged_stash"), **found(setting, "moe_expert_rank_capacity_factor")},
        "without a capacity there is nothing to page",
        "Set moe_expert_rank_capacity_factor, or leave out moe_paged_stash.",
    )


def _stash_or_offload(config: RecomputeSettings) -> Clash | None:
    inside = offloaded_inside_moe(config)
    if not config.moe_paged_stash or not inside:
        return None
    return Clash(
        found(config, "moe_paged_stash", "offload_modules"),
        "the stash holds these activations already",
        f"Leave out {' and '.join(inside)}.",
    )


STASH_RULES = (
    Rule(
        name="stash-and-layers",
        when="`moe_paged_stash` with `cpu_offloading`",
        megatron="ValueError",
        ours="error",
        why="both would take the same values",
        alone=_stash_and_layers,
    ),
    Rule(
        name="stash-needs-capacity",
        when="`moe_paged_stash` without `moe_expert_rank_capacity_factor`",
        megatron="ValueError",
        ours="error",
        why="it would have no effect",
        within=_stash_needs_capacity,
    ),
    Rule(
        name="stash-or-offload",
        when="`moe_paged_stash` with offload of `expert_fc1`, `moe_act` or `fused_group_mlp`",
        megatron="ValueError",
        ours="error",
        why="both would take the same values",
        alone=_stash_or_offload,
    ),
)
