"""Megatron's names for the modules of a layer, and what it does with the output of each.

Read in Megatron-LM main at d98e8a64 (`TransformerConfig.recompute_modules`, `offload_modules`).
"""

from __future__ import annotations

from typing import Final, Literal, get_args

from recollect.plans.action import Action

__all__ = ["MEGATRON_OUTPUT", "MODULES", "OFFLOAD_MODULES", "ModuleName"]

ModuleName = Literal[
    "core_attn",
    "mlp",
    "moe",
    "shared_experts",
    "layernorm",
    "moe_act",
    "mla_up_proj",
    "gdn_norm_out",
    "gdp_in_proj",
    "gdp_qkv",
    "mhc",
]
MODULES: Final[tuple[ModuleName, ...]] = get_args(ModuleName)

_ORDINARY = frozenset({"core_attn", "mlp", "moe", "shared_experts"})
MEGATRON_OUTPUT: Final[dict[ModuleName, Action]] = {
    name: Action.KEEP if name in _ORDINARY else Action.RECOMPUTE for name in MODULES
}
"""What Megatron does with what a module returns: "keep" under `CheckpointFunction`, "recompute" under
`CheckpointWithoutOutput`, which it calls output-discarding."""

OFFLOAD_MODULES: Final[tuple[str, ...]] = (
    "attn_norm",
    "qkv_linear",
    "core_attn",
    "attn_proj",
    "mlp_norm",
    "expert_fc1",
    "moe_act",
    "fused_group_mlp",
    "gdp_qkv",
)
