"""Rules about which layers are recomputed: granularity, method, number of layers."""

from __future__ import annotations

from recollect.integrations.megatron.condition import ON, ONE_RANK, SET, UNSET, below, one_of, other_than
from recollect.integrations.megatron.pipeline import chunk_sizes
from recollect.integrations.megatron.recompute_settings import RecomputeSettings
from recollect.integrations.megatron.rule import Clash, Rule
from recollect.integrations.megatron.training_setting import TrainingSetting

__all__ = ["RECOMPUTE_RULES", "num_layers_clash"]

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


RECOMPUTE_RULES = (
    Rule(
        name="granularity",
        when="`recompute_granularity` is not None, `full` or `selective`",
        why="meaningless; recollect suggests the closest word",
        breaks={"recompute_granularity": other_than(None, "full", "selective")},
        reason="no such granularity",
        advice="Set it to 'full', 'selective' or None.",
        known=("full", "selective"),
    ),
    Rule(
        name="method",
        when="`recompute_method` is not None, `uniform` or `block`",
        megatron="ValueError if there is a granularity, else nothing",
        why="meaningless",
        breaks={"recompute_method": other_than(None, "uniform", "block")},
        reason="no such method",
        advice="Set it to 'uniform' or 'block'.",
        known=("uniform", "block"),
    ),
    Rule(
        name="num-layers-positive",
        when="`recompute_num_layers` is 0, negative, a bool or not a whole number",
        megatron="nothing; `uniform` with 0 never ends",
        why="meaningless",
        breaks={"recompute_num_layers": below(1)},
        reason="not a number of layers",
        advice="Set it to a whole number, 1 or more; to recompute nothing, leave out recompute_granularity.",
    ),
    Rule(
        name="full-needs-method",
        why="`uniform` and `block` differ; nobody can guess which. ROLL's default is in `recollect.integrations.megatron.roll`",
        breaks={"recompute_granularity": one_of("full"), "recompute_method": UNSET},
        reason="full recompute needs a method",
        advice="Set recompute_method to 'uniform' or 'block'.",
    ),
    Rule(
        name="full-needs-num-layers",
        megatron="ValueError, which names a range that it never checks",
        why="as above",
        breaks={"recompute_granularity": one_of("full"), "recompute_num_layers": UNSET},
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
        why="it would have no effect; Megatron-Bridge's `-rl` beside `--recompute_modules` ends here",
        breaks={"recompute_granularity": one_of("selective"), "recompute_num_layers": SET},
        reason="selective recompute is the same in every layer",
        advice="Leave recompute_num_layers out, or set recompute_granularity to 'full'.",
    ),
    Rule(
        name="selective-has-no-method",
        megatron="AssertionError on the command line; the configuration object ignores it",
        why="it would have no effect",
        breaks={"recompute_granularity": one_of("selective"), "recompute_method": SET},
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
        why="they contradict each other",
        breaks={"recompute_granularity": one_of("full"), "moe_layer_recompute": ON},
        reason="one asks for whole layers, the other for modules",
        advice="Leave out moe_layer_recompute: full recompute takes the experts with the rest of the layer.",
    ),
    Rule(
        name="distribute-needs-full",
        megatron="AssertionError on the command line; ignored by the configuration object, though its guide shows it",
        why="it would have no effect",
        breaks={"recompute_granularity": other_than("full"), "distribute_saved_activations": ON},
        reason="only the kept inputs of whole layers are ever distributed",
        advice="Leave it out, or set recompute_granularity to 'full'.",
    ),
    Rule(
        name="distribute-without-tensor-parallel",
        megatron="AssertionError on the command line; nothing in the configuration object",
        why="it would have no effect",
        breaks={"distribute_saved_activations": ON, "tensor_model_parallel_size": ONE_RANK},
        reason="there are no ranks to distribute to",
        advice="Leave it out, or set tensor_model_parallel_size to 2 or more.",
    ),
    Rule(
        name="distribute-with-sequence-parallel",
        why="the kept values are already split",
        breaks={"distribute_saved_activations": ON, "sequence_parallel": ON},
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
        settings=("recompute_granularity", "recompute_method", _MICRO_BATCHES),
        reason="all micro-batches recompute the same",
        advice="Leave it out, or set recompute_granularity to 'full' and recompute_method to 'block'.",
    ),
    Rule(
        name="micro-batches-without-pipeline",
        megatron="nothing; it is ignored",
        why="it would have no effect",
        breaks={_MICRO_BATCHES: SET, "pipeline_model_parallel_size": ONE_RANK},
        reason="several micro-batches are in flight in a pipeline only",
        advice="Leave it out, or set pipeline_model_parallel_size to 2 or more.",
    ),
)
