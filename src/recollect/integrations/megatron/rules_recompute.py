"""Rules about which layers are recomputed: granularity, method, number of layers."""

from __future__ import annotations

from recollect.integrations.megatron.pipeline import chunk_sizes
from recollect.integrations.megatron.recompute_settings import RecomputeSettings
from recollect.integrations.megatron.rule import Clash, Rule, did_you_mean, found
from recollect.integrations.megatron.training_setting import TrainingSetting

__all__ = ["RECOMPUTE_RULES", "num_layers_clash"]

_WHAT = ("recompute_granularity", "recompute_method")


def _granularity(config: RecomputeSettings) -> Clash | None:
    value = config.recompute_granularity
    if value in (None, "full", "selective"):
        return None
    advice = f"{did_you_mean(value, ['full', 'selective'])}Set it to 'full', 'selective' or None."
    return Clash(found(config, "recompute_granularity"), "no such granularity", advice)


def _method(config: RecomputeSettings) -> Clash | None:
    value = config.recompute_method
    if value in (None, "uniform", "block"):
        return None
    advice = f"{did_you_mean(value, ['uniform', 'block'])}Set it to 'uniform' or 'block'."
    return Clash(found(config, "recompute_method"), "no such method", advice)


def _full_needs_method(config: RecomputeSettings) -> Clash | None:
    if config.recompute_granularity != "full" or config.recompute_method is not None:
        return None
    return Clash(
        found(config, "recompute_granularity", "recompute_method"),
        "full recompute needs a method",
        "Set recompute_method to 'uniform' or 'block'.",
    )


def _full_needs_num_layers(config: RecomputeSettings) -> Clash | None:
    if config.recompute_granularity != "full" or config.recompute_num_layers is not None:
        return None
    return Clash(
        found(config, "recompute_granularity", "recompute_num_layers"),
        "full recompute needs a number of layers",
        "Set recompute_num_layers, for example to 1",
    )


def _selective_has_no_num_layers(config: RecomputeSettings) -> Clash | None:
    if config.recompute_granularity != "selective" or config.recompute_num_layers is None:
        return None
    return Clash(
        found(config, "recompute_granularity", "recompute_num_layers"),
        "selective recompute is the same in every layer",
        "Leave recompute_num_layers out, or set recompute_granularity to 'full'.",
    )


def _selective_has_no_method(config: RecomputeSettings) -> Clash | None:
    if config.recompute_granularity != "selective" or config.recompute_method is None:
        return None
    return Clash(
        found(config, "recompute_granularity", "recompute_method"),
        "a method says which whole layers to recompute, and selective recomputes modules of all",
        "Leave recompute_method out, or set recompute_granularity to 'full'.",
    )


def _num_layers_positive(config: RecomputeSettings) -> Clash | None:
    value = config.recompute_num_layers
    if value is None or (type(value) is int and value >= 1):
        return None
    return Clash(
        found(config, "recompute_num_layers"),
        "not a number of layers",
        "Set it to a whole number, 1 or more; to recompute nothing, leave out recompute_granularity.",
    )


def _num_layers_in_range(config: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    return None if setting.num_layers is None else num_layers_clash(config, chunk_sizes(setting, setting.num_layers))


def num_layers_clash(config: RecomputeSettings, sizes: list[int]) -> Clash | None:
    """Return the clash if more layers should be recomputed than the largest model chunk has."""
    value = config.recompute_num_layers
    if config.recompute_granularity != "full" or value is None or value <= max(sizes):
        return None
    chunks = "the model has" if len(sizes) == 1 else f"the largest of {len(sizes)} model chunks has"
    return Clash(
        found(config, "recompute_method", "recompute_num_layers"),
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


def _modules_with_full(config: RecomputeSettings) -> Clash | None:
    if config.recompute_granularity != "full" or not config.recompute_modules or config.moe_layer_recompute:
        return None
    return Clash(
        found(config, "recompute_granularity", "recompute_modules"),
        "full recompute takes whole layers, whatever recompute_modules says",
        "Leave it out.",
    )


def _moe_layer_recompute(config: RecomputeSettings) -> Clash | None:
    if not config.moe_layer_recompute or config.recompute_granularity == "full":
        return None
    names = " ".join(config.modules)
    return Clash(
        found(config, "moe_layer_recompute"),
        f"it is deprecated, and means selective recompute of {names}",
        f"Set recompute_granularity to 'selective' and recompute_modules to {list(config.modules)}.",
    )


def _moe_layer_recompute_with_full(config: RecomputeSettings) -> Clash | None:
    if not config.moe_layer_recompute or config.recompute_granularity != "full":
        return None
    return Clash(
        found(config, "recompute_granularity", "moe_layer_recompute"),
        "one asks for whole layers, the other for modules",
        "Leave out moe_layer_recompute: full recompute takes the experts with the rest of the layer.",
    )


def _distribute_with_sequence_parallel(config: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    if not (config.distribute_saved_activations and setting.sequence_parallel):
        return None
    return Clash(
        {**found(config, "distribute_saved_activations"), **found(setting, "sequence_parallel")},
        "sequence parallelism has already split the kept values",
        "Leave out distribute_saved_activations.",
    )


def _distribute_needs_full(config: RecomputeSettings) -> Clash | None:
    if not config.distribute_saved_activations or config.recompute_granularity == "full":
        return None
    return Clash(
        found(config, "recompute_granularity", "distribute_saved_activations"),
        "only the kept inputs of whole layers are ever distributed",
        "Leave it out, or set recompute_granularity to 'full'.",
    )


def _distribute_needs_tensor_parallel(config: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    if not config.distribute_saved_activations or setting.tensor_model_parallel_size > 1:
        return None
    return Clash(
        {**found(config, "distribute_saved_activations"), **found(setting, "tensor_model_parallel_size")},
        "there are no ranks to distribute to",
        "Leave it out, or set tensor_model_parallel_size to 2 or more.",
    )


def _alike_micro_batches(config: RecomputeSettings) -> Clash | None:
    is_block = config.recompute_granularity == "full" and config.recompute_method == "block"
    if config.num_microbatches_with_partial_activation_checkpoints is None or is_block:
        return None
    return Clash(
        found(config, *_WHAT, "num_microbatches_with_partial_activation_checkpoints"),
        "all micro-batches recompute the same",
        "Leave it out, or set recompute_granularity to 'full' and recompute_method to 'block'.",
    )


def _micro_batches_need_pipeline(config: RecomputeSettings, setting: TrainingSetting) -> Clash | None:
    number = config.num_microbatches_with_partial_activation_checkpoints
    if number is None or setting.pipeline_model_parallel_size > 1:
        return None
    return Clash(
        {
            **found(config, "num_microbatches_with_partial_activation_checkpoints"),
            **found(setting, "pipeline_model_parallel_size"),
        },
        "several micro-batches are in flight in a pipeline only",
        "Leave it out, or set pipeline_model_parallel_size to 2 or more.",
    )


RECOMPUTE_RULES = (
    Rule(
        name="granularity",
        when="`recompute_granularity` is not None, `full` or `selective`",
        megatron="ValueError",
        ours="error",
        why="meaningless; recollect suggests the closest word",
        alone=_granularity,
    ),
    Rule(
        name="method",
        when="`recompute_method` is not None, `uniform` or `block`",
        megatron="ValueError if there is a granularity, else nothing",
        ours="error",
        why="meaningless",
        alone=_method,
    ),
    Rule(
        name="num-layers-positive",
        when="`recompute_num_layers` is 0, negative, a bool or not a whole number",
        megatron="nothing; `uniform` with 0 never ends",
        ours="error",
        why="meaningless",
        alone=_num_layers_positive,
    ),
    Rule(
        name="full-needs-method",
        when="`full` without `recompute_method`",
        megatron="ValueError",
        ours="error",
        why="`uniform` and `block` differ; nobody can guess which. ROLL's default is in `recollect.integrations.megatron.roll`",
        alone=_full_needs_method,
    ),
    Rule(
        name="full-needs-num-layers",
        when="`full` without `recompute_num_layers`",
        megatron="ValueError, which names a range that it never checks",
        ours="error",
        why="as above",
        alone=_full_needs_num_layers,
    ),
    Rule(
        name="num-layers-range",
        when="`recompute_num_layers` above the layers of the largest (virtual) pipeline stage",
        megatron="nothing; the number is clamped",
        ours="error",
        why="the number was meant for another model or another layout; checked against the model itself too",
        within=_num_layers_in_range,
    ),
    Rule(
        name="num-layers-divides",
        when="`uniform` with a number that does not divide a stage's layers",
        megatron="nothing (an index error up to 0.9, issue 1807)",
        ours="same",
        why="the last region is shorter",
    ),
    Rule(
        name="selective-has-no-num-layers",
        when="`selective` with `recompute_num_layers`",
        megatron="ValueError",
        ours="error",
        why="it would have no effect; Megatron-Bridge's `-rl` beside `--recompute_modules` ends here",
        alone=_selective_has_no_num_layers,
    ),
    Rule(
        name="selective-has-no-method",
        when="`selective` with `recompute_method`",
        megatron="AssertionError on the command line; the configuration object ignores it",
        ours="error",
        why="it would have no effect",
        alone=_selective_has_no_method,
    ),
    Rule(
        name="needs-granularity",
        when="method, number of layers or modules without `recompute_granularity`",
        megatron="nothing; they are ignored",
        ours="warning",
        why="recipes have such leftovers, and their authors may believe that something is recomputed",
        alone=_without_granularity,
    ),
    Rule(
        name="modules-with-full",
        when="`full` with `recompute_modules`",
        megatron="nothing; they are ignored",
        ours="warning",
        why="as above",
        alone=_modules_with_full,
    ),
    Rule(
        name="moe-layer-recompute",
        when="`moe_layer_recompute`",
        megatron="warning that names a nonexistent module `moe_layer`",
        ours="warning",
        why="it is selective recompute with `moe` added to the other modules, core_attn among them by default",
        alone=_moe_layer_recompute,
    ),
    Rule(
        name="moe-layer-recompute-with-full",
        when="`moe_layer_recompute` with `full`",
        megatron="ValueError",
        ours="error",
        why="they contradict each other",
        alone=_moe_layer_recompute_with_full,
    ),
    Rule(
        name="distribute-needs-full",
        when="`distribute_saved_activations` without `full`",
        megatron="AssertionError on the command line; ignored by the configuration object, though its guide shows it",
        ours="error",
        why="it would have no effect",
        alone=_distribute_needs_full,
    ),
    Rule(
        name="distribute-without-tensor-parallel",
        when="`distribute_saved_activations` with `tensor_model_parallel_size` 1",
        megatron="AssertionError on the command line; nothing in the configuration object",
        ours="error",
        why="it would have no effect",
        within=_distribute_needs_tensor_parallel,
    ),
    Rule(
        name="distribute-with-sequence-parallel",
        when="`distribute_saved_activations` with `sequence_parallel`",
        megatron="ValueError",
        ours="error",
        why="the kept values are already split",
        within=_distribute_with_sequence_parallel,
    ),
    Rule(
        name="micro-batches-alike",
        when="`num_microbatches_with_partial_activation_checkpoints` without `full` and `block`",
        megatron="nothing",
        ours="warning",
        why="it has no effect",
        alone=_alike_micro_batches,
    ),
    Rule(
        name="micro-batches-without-pipeline",
        when="`num_microbatches_with_partial_activation_checkpoints` with `pipeline_model_parallel_size` 1",
        megatron="nothing; it is ignored",
        ours="error",
        why="it would have no effect",
        within=_micro_batches_need_pipeline,
    ),
)
