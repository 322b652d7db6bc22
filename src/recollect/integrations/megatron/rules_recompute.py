"""Rules about which layers and which modules of them are recomputed."""

from __future__ import annotations

from recollect.integrations.megatron.choice import MODULES
from recollect.integrations.megatron.condition import OFF, ON, ONE_RANK, SET, UNSET, below, has, one_of, other_than
from recollect.integrations.megatron.pipeline import chunk_sizes
from recollect.integrations.megatron.recompute_settings import RecomputeSettings
from recollect.integrations.megatron.rule import Clash, Rule, found
from recollect.integrations.megatron.training_setting import TrainingSetting

__all__ = ["RECOMPUTE_RULES", "num_layers_clash"]

_DELTA_NETS = ("gdn", "gdn2", "gated_delta_net")
_MICRO_BATCHES = "num_microbatches_with_partial_activation_checkpoints"


def _num_layers_in_range(config: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    return None if setting.num_layers is None else num_layers_clash(config, chunk_sizes(setting, setting.num_layers))


def num_layers_clash(config: RecomputeSettings, sizes: list[int]) -> Clash | None:
    """Return the clash if more layers should be recomputed than the largest model chunk has."""
    value = config.recompute_num_layers
    if config.recompute_granularity != "full" or value is None or value <= max(sizes):
        return None
    chunks = "the model has" if len(sizes) == 1 else f"the largest of {len(sizes)} model chunks has"
    return Clash(
        {"recompute_method": config.recompute_method, "recompute_num_layers": value},
        f"{chunks} {max(sizes)} layers",
        f"Set recompute_num_layers to 1 to {max(sizes)}; it is counted in each virtual pipeline stage.",
    )


def _without_granularity(config: RecomputeSettings) -> Clash | None:
    if config.is_selective or config.recompute_granularity is not None:
        return None
    names = ("recompute_method", "recompute_num_layers", "recompute_modules", "recompute_discard_outputs")
    given = {name: getattr(config, name) for name in names if getattr(config, name)}
    if not given:
        return None
    return Clash(
        {"recompute_granularity": None, **given},
        "without a granularity nothing is recomputed",
        "Set recompute_granularity to 'full' or 'selective', or leave the others out.",
    )


def _moe_layer_recompute(config: RecomputeSettings) -> Clash | None:
    if not config.moe_layer_recompute or config.recompute_granularity == "full":
        return None
    names = " ".join(config.modules)
    return Clash(
        {"moe_layer_recompute": True},
        f"it is deprecated, and means selective recompute of {names}",
        f"Set recompute_granularity to 'selective' and recompute_modules to {list(config.modules)}.",
    )


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


RECOMPUTE_RULES = {
    # Which layers: granularity, method, number of layers.
    "granularity": Rule(
        when="`recompute_granularity` is not None, `full` or `selective`",
        why="meaningless; recollect suggests the closest word",
        breaks={"recompute_granularity": other_than(None, "full", "selective")},
        reason="no such granularity",
        advice="Set it to 'full', 'selective' or None.",
        known=("full", "selective"),
    ),
    "method": Rule(
        when="`recompute_method` is not None, `uniform` or `block`",
        megatron="ValueError if there is a granularity, else nothing",
        breaks={"recompute_method": other_than(None, "uniform", "block")},
        reason="no such method",
        advice="Set it to 'uniform' or 'block'.",
        known=("uniform", "block"),
    ),
    "num-layers-positive": Rule(
        when="`recompute_num_layers` is 0, negative, a bool or not a whole number",
        megatron="nothing; `uniform` with 0 never ends",
        breaks={"recompute_num_layers": below(1)},
        reason="not a number of layers",
        advice="Set it to a whole number, 1 or more; to recompute nothing, leave out recompute_granularity.",
    ),
    "full-needs-method": Rule(
        why="`uniform` and `block` differ; nobody can guess which. ROLL's default is in `recollect.integrations.megatron.roll`",
        breaks={"recompute_granularity": one_of("full"), "recompute_method": UNSET},
        reason="full recompute needs a method",
        advice="Set recompute_method to 'uniform' or 'block'.",
    ),
    "full-needs-num-layers": Rule(
        megatron="ValueError, which names a range that it never checks",
        why="as above",
        breaks={"recompute_granularity": one_of("full"), "recompute_num_layers": UNSET},
        reason="full recompute needs a number of layers",
        advice="Set recompute_num_layers, for example to 1",
    ),
    "num-layers-range": Rule(
        when="`recompute_num_layers` above the layers of the largest (virtual) pipeline stage",
        megatron="nothing; the number is clamped",
        why="the number was meant for another model or another layout; checked against the model itself too",
        within=_num_layers_in_range,
    ),
    "num-layers-divides": Rule(
        when="`uniform` with a number that does not divide a stage's layers",
        megatron="nothing (an index error up to 0.9, issue 1807)",
        ours="same",
        why="the last region is shorter",
    ),
    "selective-has-no-num-layers": Rule(
        why="it would have no effect; Megatron-Bridge's `-rl` beside `--recompute_modules` ends here",
        breaks={"recompute_granularity": one_of("selective"), "recompute_num_layers": SET},
        reason="selective recompute is the same in every layer",
        advice="Leave recompute_num_layers out, or set recompute_granularity to 'full'.",
    ),
    "selective-has-no-method": Rule(
        megatron="AssertionError on the command line; the configuration object ignores it",
        breaks={"recompute_granularity": one_of("selective"), "recompute_method": SET},
        reason="a method says which whole layers to recompute, and selective recomputes modules of all",
        advice="Leave recompute_method out, or set recompute_granularity to 'full'.",
    ),
    "needs-granularity": Rule(
        when="method, number of layers or modules without `recompute_granularity`",
        megatron="nothing; they are ignored",
        ours="warning",
        why="recipes have such leftovers, and their authors may believe that something is recomputed",
        alone=_without_granularity,
    ),
    "modules-with-full": Rule(
        when="`full` with `recompute_modules`",
        megatron="nothing; they are ignored",
        ours="warning",
        why="as above",
        alone=lambda config: (
            config.recompute_granularity == "full" and config.recompute_modules and not config.moe_layer_recompute
        ),
        settings=("recompute_granularity", "recompute_modules"),
        reason="full recompute takes whole layers, whatever recompute_modules says",
        advice="Leave it out.",
    ),
    "moe-layer-recompute": Rule(
        when="`moe_layer_recompute`",
        megatron="warning that names a nonexistent module `moe_layer`",
        ours="warning",
        why="it is selective recompute with `moe` added to the other modules, core_attn among them by default",
        alone=_moe_layer_recompute,
    ),
    "moe-layer-recompute-with-full": Rule(
        breaks={"recompute_granularity": one_of("full"), "moe_layer_recompute": ON},
        reason="one asks for whole layers, the other for modules",
        advice="Leave out moe_layer_recompute: full recompute takes the experts with the rest of the layer.",
    ),
    "distribute-needs-full": Rule(
        megatron="AssertionError on the command line; ignored by the configuration object, though its guide shows it",
        breaks={"recompute_granularity": other_than("full"), "distribute_saved_activations": ON},
        reason="only the kept inputs of whole layers are ever distributed",
        advice="Leave it out, or set recompute_granularity to 'full'.",
    ),
    "distribute-without-tensor-parallel": Rule(
        megatron="AssertionError on the command line; nothing in the configuration object",
        breaks={"distribute_saved_activations": ON, "tensor_model_parallel_size": ONE_RANK},
        reason="there are no ranks to distribute to",
        advice="Leave it out, or set tensor_model_parallel_size to 2 or more.",
    ),
    "distribute-with-sequence-parallel": Rule(
        breaks={"distribute_saved_activations": ON, "sequence_parallel": ON},
        reason="sequence parallelism has already split the kept values",
        advice="Leave out distribute_saved_activations.",
    ),
    "micro-batches-alike": Rule(
        when="`num_microbatches_with_partial_activation_checkpoints` without `full` and `block`",
        megatron="nothing",
        ours="warning",
        alone=lambda config: (
            config.num_microbatches_with_partial_activation_checkpoints is not None
            and (config.recompute_granularity, config.recompute_method) != ("full", "block")
        ),
        settings=("recompute_granularity", "recompute_method", _MICRO_BATCHES),
        reason="all micro-batches recompute the same",
        advice="Leave it out, or set recompute_granularity to 'full' and recompute_method to 'block'.",
    ),
    "micro-batches-without-pipeline": Rule(
        megatron="nothing; it is ignored",
        breaks={_MICRO_BATCHES: SET, "pipeline_model_parallel_size": ONE_RANK},
        reason="several micro-batches are in flight in a pipeline only",
        advice="Leave it out, or set pipeline_model_parallel_size to 2 or more.",
    ),
    # Which modules.
    "list-of-modules": Rule(
        when="a string instead of a list of modules",
        megatron="AssertionError about single letters",
        why="the string `core_attn,mlp` is ROLL's spelling, which `recollect.integrations.megatron.roll` reads",
        alone=_is_a_list,
    ),
    "known-modules": Rule(
        when="an unknown name in `recompute_modules`",
        megatron="AssertionError if selective, else nothing",
        why="recollect suggests the closest name",
        alone=lambda config: [name for name in config.recompute_modules or () if name not in MODULES],
        settings=("recompute_modules",),
        reason="nothing is called {!r}",
        advice=f"Choose from {', '.join(MODULES)}.",
        known=MODULES,
    ),
    "empty-modules": Rule(
        when="`selective` with an empty list",
        megatron="nothing; nothing is recomputed, though Bridge's guide calls the list required",
        ours="warning",
        why="recipes use it for a run without recompute",
        alone=lambda config: config.is_selective and not config.modules,
        settings=("recompute_granularity", "recompute_modules"),
        reason="an empty list, so nothing is recomputed",
        advice="Leave out recompute_granularity to say so, or recompute_modules for the default, core_attn.",
    ),
    "discard-outputs": Rule(
        when="`recompute_discard_outputs` names a module that is not recomputed",
        megatron="has no such setting",
        why="the name would have no effect",
        alone=_discarded_is_recomputed,
    ),
    "modules-not-there": Rule(
        when="a module that no layer of the model has",
        megatron="nothing; it is ignored unless another rule applies",
        why="if no layer has any of the modules; a warning if layers have some of them, as with alternating `mlp` and `moe`",
    ),
    "core-attn-fused": Rule(
        when="`core_attn`",
        megatron="warning: fused attention may make it unnecessary",
        ours="same",
        why="without the warning: `layer_usage` reports the bytes that it saves",
    ),
    "moe-act-needs-experts": Rule(
        megatron="ValueError, through the next rule",
        breaks={"modules": has("moe_act"), "num_moe_experts": OFF},
        reason="a model without experts has no moe_act",
        advice="Leave it out; a dense model's activation is inside mlp.",
    ),
    "moe-act-needs-grouped-gemm": Rule(
        when="`moe_act` without `moe_grouped_gemm`",
        ours="free",
        why="the tape also sees the activations of experts that run one after the other",
    ),
    "mla-up-proj-needs-mla": Rule(
        breaks={"modules": has("mla_up_proj"), "multi_latent_attention": OFF},
        reason="the model has no up-projection from latents",
        advice="Leave out mla_up_proj, or set multi_latent_attention.",
    ),
    "gdn-needs-gdn": Rule(
        when="`gdn_norm_out` without a gated delta net",
        breaks={"modules": has("gdn_norm_out"), "experimental_attention_variant": other_than(*_DELTA_NETS)},
        reason="only a gated delta net has gdn_norm_out",
        advice="Leave it out, or set experimental_attention_variant to 'gdn' or 'gdn2'.",
    ),
    "shared-experts-overlap": Rule(
        when="`shared_experts` with `moe_shared_expert_overlap`",
        ours="free",
        why="single values are recomputed, not a region of Python that has to run in one piece",
    ),
}
