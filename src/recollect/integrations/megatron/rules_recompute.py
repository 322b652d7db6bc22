"""Rules about which layers are recomputed: granularity, method, number of layers."""

from __future__ import annotations

from recollect.integrations.megatron.pipeline import chunk_sizes
from recollect.integrations.megatron.recompute_settings import RecomputeSettings
from recollect.integrations.megatron.rule import Clash, Rule, found
from recollect.integrations.megatron.training_setting import TrainingSetting

__all__ = ["RECOMPUTE_RULES", "num_layers_clash"]

_WHAT = ("recompute_granularity", "recompute_method")


def _other(value: object, *known: object) -> list[object]:
    return [] if value in known else [value]


def _is_number_of_layers(value: object) -> bool:
    return value is None or (type(value) is int and value >= 1)


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


def _moe_layer_recompute(config: RecomputeSettings) -> Clash | None:
    if not config.moe_layer_recompute or config.recompute_granularity == "full":
        return None
    names = " ".join(config.modules)
    return Clash(
        found(config, "moe_layer_recompute"),
        f"it is deprecated, and means selective recompute of {names}",
        f"Set recompute_granularity to 'selective' and recompute_modules to {list(config.modules)}.",
    )


RECOMPUTE_RULES = (
    Rule(
        name="granularity",
        when="`recompute_granularity` is not None, `full` or `selective`",
        megatron="ValueError",
        why="meaningless; recollect suggests the closest word",
        alone=lambda config: _other(config.recompute_granularity, None, "full", "selective"),
        settings=("recompute_granularity",),
        reason="no such granularity",
        advice="Set it to 'full', 'selective' or None.",
        known=("full", "selective"),
    ),
    Rule(
        name="method",
        when="`recompute_method` is not None, `uniform` or `block`",
        megatron="ValueError if there is a granularity, else nothing",
        why="meaningless",
        alone=lambda config: _other(config.recompute_method, None, "uniform", "block"),
        settings=("recompute_method",),
        reason="no such method",
        advice="Set it to 'uniform' or 'block'.",
        known=("uniform", "block"),
    ),
    Rule(
        name="num-layers-positive",
        when="`recompute_num_layers` is 0, negative, a bool or not a whole number",
        megatron="nothing; `uniform` with 0 never ends",
        why="meaningless",
        alone=lambda config: not _is_number_of_layers(config.recompute_num_layers),
        settings=("recompute_num_layers",),
        reason="not a number of layers",
        advice="Set it to a whole number, 1 or more; to recompute nothing, leave out recompute_granularity.",
    ),
    Rule(
        name="full-needs-method",
        when="`full` without `recompute_method`",
        megatron="ValueError",
        why="`uniform` and `block` differ; nobody can guess which. ROLL's default is in `recollect.integrations.megatron.roll`",
        alone=lambda config: config.recompute_granularity == "full" and config.recompute_method is None,
        settings=_WHAT,
        reason="full recompute needs a method",
        advice="Set recompute_method to 'uniform' or 'block'.",
    ),
    Rule(
        name="full-needs-num-layers",
        when="`full` without `recompute_num_layers`",
        megatron="ValueError, which names a range that it never checks",
        why="as above",
        alone=lambda config: config.recompute_granularity == "full" and config.recompute_num_layers is None,
        settings=("recompute_granularity", "recompute_num_layers"),
        reason="full recompute needs a number of layers",
        advice="Set recompute_num_layers, for example to 1",
    ),
    Rule(
        name="num-layers-range",
        when="`recompute_num_layers` above the layers of the largest (virtual) pipeline stage",
        megatron="nothing; the number is clamped",
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
        why="it would have no effect; Megatron-Bridge's `-rl` beside `--recompute_modules` ends here",
        alone=lambda config: config.recompute_granularity == "selective" and config.recompute_num_layers is not None,
        settings=("recompute_granularity", "recompute_num_layers"),
        reason="selective recompute is the same in every layer",
        advice="Leave recompute_num_layers out, or set recompute_granularity to 'full'.",
    ),
    Rule(
        name="selective-has-no-method",
        when="`selective` with `recompute_method`",
        megatron="AssertionError on the command line; the configuration object ignores it",
        why="it would have no effect",
        alone=lambda config: config.recompute_granularity == "selective" and config.recompute_method is not None,
        settings=_WHAT,
        reason="a method says which whole layers to recompute, and selective recomputes modules of all",
        advice="Leave recompute_method out, or set recompute_granularity to 'full'.",
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
        alone=lambda config: (
            config.recompute_granularity == "full" and config.recompute_modules and not config.moe_layer_recompute
        ),
        settings=("recompute_granularity", "recompute_modules"),
        reason="full recompute takes whole layers, whatever recompute_modules says",
        advice="Leave it out.",
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
        why="they contradict each other",
        alone=lambda config: config.moe_layer_recompute and config.recompute_granularity == "full",
        settings=("recompute_granularity", "moe_layer_recompute"),
        reason="one asks for whole layers, the other for modules",
        advice="Leave out moe_layer_recompute: full recompute takes the experts with the rest of the layer.",
    ),
    Rule(
        name="distribute-needs-full",
        when="`distribute_saved_activations` without `full`",
        megatron="AssertionError on the command line; ignored by the configuration object, though its guide shows it",
        why="it would have no effect",
        alone=lambda config: config.distribute_saved_activations and config.recompute_granularity != "full",
        settings=("recompute_granularity", "distribute_saved_activations"),
        reason="only the kept inputs of whole layers are ever distributed",
        advice="Leave it out, or set recompute_granularity to 'full'.",
    ),
    Rule(
        name="distribute-without-tensor-parallel",
        when="`distribute_saved_activations` with `tensor_model_parallel_size` 1",
        megatron="AssertionError on the command line; nothing in the configuration object",
        why="it would have no effect",
        within=lambda config, setting: config.distribute_saved_activations and setting.tensor_model_parallel_size <= 1,
        settings=("distribute_saved_activations", "tensor_model_parallel_size"),
        reason="there are no ranks to distribute to",
        advice="Leave it out, or set tensor_model_parallel_size to 2 or more.",
    ),
    Rule(
        name="distribute-with-sequence-parallel",
        when="`distribute_saved_activations` with `sequence_parallel`",
        megatron="ValueError",
        why="the kept values are already split",
        within=lambda config, setting: config.distribute_saved_activations and setting.sequence_parallel,
        settings=("distribute_saved_activations", "sequence_parallel"),
        reason="sequence parallelism has already split the kept values",
        advice="Leave out distribute_saved_activations.",
    ),
    Rule(
        name="micro-batches-alike",
        when="`num_microbatches_with_partial_activation_checkpoints` without `full` and `block`",
        megatron="nothing",
        ours="warning",
        why="it has no effect",
        alone=lambda config: (
            config.num_microbatches_with_partial_activation_checkpoints is not None
            and (config.recompute_granularity, config.recompute_method) != ("full", "block")
        ),
        settings=(*_WHAT, "num_microbatches_with_partial_activation_checkpoints"),
        reason="all micro-batches recompute the same",
        advice="Leave it out, or set recompute_granularity to 'full' and recompute_method to 'block'.",
    ),
    Rule(
        name="micro-batches-without-pipeline",
        when="`num_microbatches_with_partial_activation_checkpoints` with `pipeline_model_parallel_size` 1",
        megatron="nothing; it is ignored",
        why="it would have no effect",
        within=lambda config, setting: (
            config.num_microbatches_with_partial_activation_checkpoints is not None
            and setting.pipeline_model_parallel_size <= 1
        ),
        settings=("num_microbatches_with_partial_activation_checkpoints", "pipeline_model_parallel_size"),
        reason="several micro-batches are in flight in a pipeline only",
        advice="Leave it out, or set pipeline_model_parallel_size to 2 or more.",
    ),
)
