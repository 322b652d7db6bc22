"""Rules about a paged stash: experts' activations in pages of tokens, on the device or the host."""

from __future__ import annotations

from recollect.integrations.megatron.recompute_settings import RecomputeSettings
from recollect.integrations.megatron.rule import Rule

__all__ = ["EXPERT_PARTS", "STASH_RULES", "offloaded"]


EXPERT_PARTS = ("moe_act", "expert_fc1", "fused_group_mlp")


def offloaded(config: RecomputeSettings, *modules: str) -> list[str]:
    """Return those of the modules that are offloaded, in one phrase; [] if none is."""
    names = [name for name in modules if name in config.offload_modules]
    return [" and ".join(names)] if names else []


STASH_RULES = (
    Rule(
        name="stash-and-layers",
        when="`moe_paged_stash` with `cpu_offloading`",
        megatron="ValueError",
        why="both would take the same values",
        alone=lambda config: config.moe_paged_stash and config.cpu_offloading,
        settings=("moe_paged_stash", "cpu_offloading"),
        reason="both would take the same values",
        advice="Leave out one of them.",
    ),
    Rule(
        name="stash-needs-capacity",
        when="`moe_paged_stash` without `moe_expert_rank_capacity_factor`",
        megatron="ValueError",
        why="it would have no effect",
        within=lambda config, setting: config.moe_paged_stash and setting.moe_expert_rank_capacity_factor is None,
        settings=("moe_paged_stash", "moe_expert_rank_capacity_factor"),
        reason="without a capacity there is nothing to page",
        advice="Set moe_expert_rank_capacity_factor, or leave out moe_paged_stash.",
    ),
    Rule(
        name="stash-or-offload",
        when="`moe_paged_stash` with offload of `expert_fc1`, `moe_act` or `fused_group_mlp`",
        megatron="ValueError",
        why="both would take the same values",
        alone=lambda config: config.moe_paged_stash and offloaded(config, *EXPERT_PARTS),
        settings=("moe_paged_stash", "offload_modules"),
        reason="the stash holds these activations already",
        advice="Leave out {}.",
    ),
)
