"""Rules about which modules are recomputed."""

from __future__ import annotations

from recollect.integrations.megatron.modules import MODULES
from recollect.integrations.megatron.recompute_settings import RecomputeSettings
from recollect.integrations.megatron.rule import Clash, Rule, did_you_mean, found
from recollect.integrations.megatron.training_setting import TrainingSetting

__all__ = ["MODULE_RULES"]


def _is_a_list(config: RecomputeSettings) -> Clash | None:
    for name in ("recompute_modules", "recompute_discard_outputs", "offload_modules"):
        value = getattr(config, name)
        if isinstance(value, str):
            return Clash({name: value}, "a string, not a list", f"Write {[part for part in value.split(',') if part]}.")
        if value is not None and not (isinstance(value, tuple) and all(isinstance(part, str) for part in value)):
            return Clash({name: value}, "not a list of names", "Write a list such as ['core_attn', 'mlp'].")
    return None


def _known(config: RecomputeSettings) -> Clash | None:
    unknown = [name for name in config.recompute_modules or () if name not in MODULES]
    if not unknown:
        return None
    advice = f"{did_you_mean(unknown[0], MODULES)}Choose from {', '.join(MODULES)}."
    return Clash(found(config, "recompute_modules"), f"nothing is called {unknown[0]!r}", advice)


def _empty(config: RecomputeSettings) -> Clash | None:
    if not config.is_selective or config.modules:
        return None
    return Clash(
        found(config, "recompute_granularity", "recompute_modules"),
        "an empty list, so nothing is recomputed",
        "Leave out recompute_granularity to say so, or recompute_modules for the default, core_attn.",
    )


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


def _moe_act_needs_grouped_gemm(config: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    if "moe_act" not in config.modules or setting.num_moe_experts:
        return None
    return Clash(
        {"recompute_modules": config.modules, **found(setting, "num_moe_experts")},
        "a model without experts has no moe_act",
        "Leave it out; a dense model's activation is inside mlp.",
    )


def _mla_up_proj_needs_mla(config: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    if "mla_up_proj" not in config.modules or setting.multi_latent_attention:
        return None
    return Clash(
        {"recompute_modules": config.modules, **found(setting, "multi_latent_attention")},
        "the model has no up-projection from latents",
        "Leave out mla_up_proj, or set multi_latent_attention.",
    )


def _gdn_needs_gdn(config: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    if "gdn_norm_out" not in config.modules:
        return None
    if setting.experimental_attention_variant in ("gdn", "gdn2", "gated_delta_net"):
        return None
    return Clash(
        {"recompute_modules": config.modules, **found(setting, "experimental_attention_variant")},
        "only a gated delta net has gdn_norm_out",
        "Leave it out, or set experimental_attention_variant to 'gdn' or 'gdn2'.",
    )


MODULE_RULES = (
    Rule(
        name="list-of-modules",
        when="a string instead of a list of modules",
        megatron="AssertionError about single letters",
        ours="error",
        why="the string `core_attn,mlp` is ROLL's spelling, which `recollect.integrations.megatron.roll` reads",
        alone=_is_a_list,
    ),
    Rule(
        name="known-modules",
        when="an unknown name in `recompute_modules`",
        megatron="AssertionError if selective, else nothing",
        ours="error",
        why="recollect suggests the closest name",
        alone=_known,
    ),
    Rule(
        name="empty-modules",
        when="`selective` with an empty list",
        megatron="nothing; nothing is recomputed, though Bridge's guide calls the list required",
        ours="warning",
        why="recipes use it for a run without recompute",
        alone=_empty,
    ),
    Rule(
        name="discard-outputs",
        when="`recompute_discard_outputs` names a module that is not recomputed",
        megatron="has no such setting",
        ours="error",
        why="the name would have no effect",
        alone=_discarded_is_recomputed,
    ),
    Rule(
        name="modules-not-there",
        when="a module that no layer of the model has",
        megatron="nothing; it is ignored unless another rule applies",
        ours="error",
        why="if no layer has any of the modules; a warning if layers have some of them, as with alternating `mlp` and `moe`",
    ),
    Rule(
        name="core-attn-fused",
        when="`core_attn`",
        megatron="warning: fused attention may make it unnecessary",
        ours="same",
        why="without the warning: `layer_usage` reports the bytes that it saves",
    ),
    Rule(
        name="moe-act-needs-experts",
        when="`moe_act` in a model without experts",
        megatron="ValueError, through the next rule",
        ours="error",
        why="the model has no such module",
        within=_moe_act_needs_grouped_gemm,
    ),
    Rule(
        name="moe-act-needs-grouped-gemm",
        when="`moe_act` without `moe_grouped_gemm`",
        megatron="ValueError",
        ours="free",
        why="the tape also sees the activations of experts that run one after the other",
    ),
    Rule(
        name="mla-up-proj-needs-mla",
        when="`mla_up_proj` without `multi_latent_attention`",
        megatron="ValueError",
        ours="error",
        why="the model has no such module",
        within=_mla_up_proj_needs_mla,
    ),
    Rule(
        name="gdn-needs-gdn",
        when="`gdn_norm_out` without a gated delta net",
        megatron="ValueError",
        ours="error",
        why="the model has no such module",
        within=_gdn_needs_gdn,
    ),
    Rule(
        name="shared-experts-overlap",
        when="`shared_experts` with `moe_shared_expert_overlap`",
        megatron="ValueError",
        ours="free",
        why="single values are recomputed, not a region of Python that has to run in one piece",
    ),
)
