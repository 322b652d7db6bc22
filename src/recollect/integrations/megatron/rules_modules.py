"""Rules about which modules are recomputed."""

from __future__ import annotations

from recollect.integrations.megatron.condition import OFF, has, other_than
from recollect.integrations.megatron.modules import MODULES
from recollect.integrations.megatron.recompute_settings import RecomputeSettings
from recollect.integrations.megatron.rule import Clash, Rule, found

__all__ = ["MODULE_RULES"]

_DELTA_NETS = ("gdn", "gdn2", "gated_delta_net")


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


MODULE_RULES = (
    Rule(
        name="list-of-modules",
        when="a string instead of a list of modules",
        megatron="AssertionError about single letters",
        why="the string `core_attn,mlp` is ROLL's spelling, which `recollect.integrations.megatron.roll` reads",
        alone=_is_a_list,
    ),
    Rule(
        name="known-modules",
        when="an unknown name in `recompute_modules`",
        megatron="AssertionError if selective, else nothing",
        why="recollect suggests the closest name",
        alone=lambda config: [name for name in config.recompute_modules or () if name not in MODULES],
        settings=("recompute_modules",),
        reason="nothing is called {!r}",
        advice=f"Choose from {', '.join(MODULES)}.",
        known=MODULES,
    ),
    Rule(
        name="empty-modules",
        when="`selective` with an empty list",
        megatron="nothing; nothing is recomputed, though Bridge's guide calls the list required",
        ours="warning",
        why="recipes use it for a run without recompute",
        alone=lambda config: config.is_selective and not config.modules,
        settings=("recompute_granularity", "recompute_modules"),
        reason="an empty list, so nothing is recomputed",
        advice="Leave out recompute_granularity to say so, or recompute_modules for the default, core_attn.",
    ),
    Rule(
        name="discard-outputs",
        when="`recompute_discard_outputs` names a module that is not recomputed",
        megatron="has no such setting",
        why="the name would have no effect",
        alone=_discarded_is_recomputed,
    ),
    Rule(
        name="modules-not-there",
        when="a module that no layer of the model has",
        megatron="nothing; it is ignored unless another rule applies",
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
        megatron="ValueError, through the next rule",
        why="the model has no such module",
        breaks={"modules": has("moe_act"), "num_moe_experts": OFF},
        reason="a model without experts has no moe_act",
        advice="Leave it out; a dense model's activation is inside mlp.",
    ),
    Rule(
        name="moe-act-needs-grouped-gemm",
        when="`moe_act` without `moe_grouped_gemm`",
        ours="free",
        why="the tape also sees the activations of experts that run one after the other",
    ),
    Rule(
        name="mla-up-proj-needs-mla",
        why="the model has no such module",
        breaks={"modules": has("mla_up_proj"), "multi_latent_attention": OFF},
        reason="the model has no up-projection from latents",
        advice="Leave out mla_up_proj, or set multi_latent_attention.",
    ),
    Rule(
        name="gdn-needs-gdn",
        when="`gdn_norm_out` without a gated delta net",
        why="the model has no such module",
        breaks={"modules": has("gdn_norm_out"), "experimental_attention_variant": other_than(*_DELTA_NETS)},
        reason="only a gated delta net has gdn_norm_out",
        advice="Leave it out, or set experimental_attention_variant to 'gdn' or 'gdn2'.",
    ),
    Rule(
        name="shared-experts-overlap",
        when="`shared_experts` with `moe_shared_expert_overlap`",
        ours="free",
        why="single values are recomputed, not a region of Python that has to run in one piece",
    ),
)
