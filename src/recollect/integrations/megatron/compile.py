"""Compile Megatron's settings into a plan: the values that a configuration drops in each layer.

The layers of one `ModuleList` form a block, as in Megatron, which a pipeline cuts into model chunks. Multi-token prediction
layers (`mtp`) count separately: with `uniform` each of them is a region, with `block` none is recomputed, as in Megatron.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain, takewhile
from typing import Any

from recollect.arguments import check_kind
from recollect.errors import ConfigError, ConfigWarning, ScheduleError
from recollect.integrations.megatron.module_values import LayerOps, modules_in, values_of_module
from recollect.integrations.megatron.offload import with_offload
from recollect.integrations.megatron.pipeline import chunk_sizes, model_chunks
from recollect.integrations.megatron.rules import RecomputeConfig, check_rule, num_layers_clash, refuse_not_yet, report
from recollect.integrations.megatron.settings import BlockFull, Choice, Selective, TrainingSetting, UniformFull
from recollect.pipelines.schedule import FORWARD, schedule_of
from recollect.planning.output_choices import outputs_within
from recollect.plans.action import Action
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from recollect.profile.graph import UnitGraph
from recollect.profile.profile import Profile
from recollect.simulation.decisions import keep_all_unit, recompute_all_unit
from recollect.simulation.predicted import predicted_plan
from recollect.warning import warn_user

Chunks = Sequence[Sequence[str]]
"""Paths of the layers of each model chunk."""


def megatron_plan(profile: Profile, config: RecomputeConfig | Any, setting: TrainingSetting | None = None) -> Plan:
    """Return the plan of a Megatron configuration, with its predicted peak and slowdown.

    Full recompute drops everything that can be recomputed, and outputs between the layers of one `uniform` region too.
    Selective recompute drops the values that the named modules compute; their outputs are kept or dropped as in Megatron
    (`MEGATRON_OUTPUT` in `settings.py`), unless `recompute_discard_outputs` says otherwise. Values that cannot be
    recomputed (a router's choices) are always kept. Under any settings, values that Megatron's own functions recompute in
    backward are dropped: a router's input in fp32 and, in a step recorded with `collectives="replay"`, results of
    all-gathers. With `distribute_saved_activations` the inputs that full recompute keeps have the action "shard". Values
    that `cpu_offloading` and `offload_modules` name have the action "offload", unless they are recomputed anyway.

    Args:
        profile: the recorded step, of the whole model or of one pipeline stage.
        config: Megatron's settings; or its own `TransformerConfig`, which has the other facts, too.
        setting: other facts for Megatron's rules; its pipeline sizes define the model chunks. None: those of a
            `TransformerConfig`; otherwise one chunk, and only the configuration and the model are checked.

    Returns:
        A plan without a budget.

    Raises:
        ArgumentError: an argument is of the wrong type.
        ConfigError: settings that clash with each other or with the model; the model has none of the named modules; parts of
            values, and the step was recorded without `recollect.distribute_saved_activations`.
        NotYetError: a setting for something that recollect cannot do yet.

    Warns:
        ConfigWarning: one of several modules is not in the model; or nothing is large enough to offload.

    Example:
        >>> import torch, recollect
        >>> from recollect.lab.models.architectures import llama_config
        >>> from recollect.lab.models.gpt import GPTModel
        >>> model = GPTModel(llama_config(num_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=64))
        >>> tokens = torch.randint(0, 64, (1, 16))
        >>> profile = recollect.record(model, {"tokens": tokens, "labels": tokens}, fake=True)
        >>> config = RecomputeConfig(recompute_granularity="selective", recompute_modules=["mlp"])
        >>> megatron_plan(profile, config).note
        'Megatron: selective, mlp'

    References:
        V. Korthikanti, J. Casper, S. Lym, L. McAfee, M. Andersch, M. Shoeybi, B. Catanzaro, "Reducing Activation
        Recomputation in Large Transformer Models", 2022. https://arxiv.org/abs/2205.05198
    """
    check_kind("megatron_plan(profile, config)", "profile", profile, Profile, "recollect.Profile")
    if not isinstance(config, RecomputeConfig) and hasattr(config, "recompute_granularity"):
        setting, config = setting or TrainingSetting.of(config), RecomputeConfig.of(config)
    check_kind("megatron_plan(profile, config)", "config", config, RecomputeConfig, "recollect.RecomputeConfig")
    return predicted_plan(profile, compiled_plan(profile, config, setting))


def compiled_plan(profile: Profile, config: RecomputeConfig, setting: TrainingSetting | None = None) -> Plan:
    """Return the plan of a configuration without predictions; see `megatron_plan`."""
    if setting is not None:
        config.check(setting)
    refuse_not_yet(config, setting)
    choice = config.choice
    chunks = _chunks(profile, setting)
    if isinstance(choice, (UniformFull, BlockFull)):
        report("num-layers-range", num_layers_clash(config, [len(chunk) for chunk in chunks]))
    heads = list(dict.fromkeys(call.path for call in profile.calls if _is_head(call.path)))
    if heads and isinstance(choice, BlockFull) and not (setting is not None and setting.mtp_num_layers):
        check_rule("mtp-block", config, TrainingSetting(mtp_num_layers=len(heads)))
    units = _units(profile, choice, chunks, heads)
    if config.distribute_saved_activations:
        units = _with_inputs_as_parts(profile, units, _with_kept_inputs(choice, chunks, heads))
    plan = Plan(units, note=f"Megatron: {choice}")
    if config.cpu_offloading and config.cpu_offloading_num_layers:
        check_rule("offload-num-layers", config, TrainingSetting(num_layers=min(map(len, chunks), default=0)))
        first = [path for chunk in chunks for path in chunk[: config.cpu_offloading_num_layers]]
        plan = with_offload(profile, plan, config, first)
    elif config.fine_grained_activation_offloading:
        layers = [*chain.from_iterable(chunks), *heads]
        _check_matched("offload", config.offload_modules, modules_in(profile, layers, config.offload_modules))
        plan = with_offload(profile, plan, config, layers)
    return plan


def _units(profile: Profile, choice: Choice, chunks: Chunks, heads: Sequence[str]) -> dict[str, UnitPlan]:
    graphs = {call.path: profile.graph_of(call) for call in profile.calls}
    layers = {path: graphs[path] for path in (*chain.from_iterable(chunks), *heads)}
    if not isinstance(choice, (UniformFull, BlockFull)):
        return _selective_units(layers, choice.outputs if isinstance(choice, Selective) else {})
    full: Collection[str] = ()
    dropped: Collection[str] = ()
    if isinstance(choice, BlockFull):
        full = {path for chunk in chunks for path in chunk[: choice.num_layers]}
    else:
        n, full = choice.num_layers, layers
        dropped = outputs_within(profile, [chunk[i : i + n] for chunk in chunks for i in range(0, len(chunk), n)])
    rest = _selective_units({path: graph for path, graph in layers.items() if path not in full}, {})
    return {
        path: rest.get(path) or recompute_all_unit(graph, keeps_output=path not in dropped)
        for path, graph in layers.items()
    }


def _with_kept_inputs(choice: Choice, chunks: Chunks, heads: Sequence[str]) -> set[str]:
    """Return the layers from whose input a recompute starts, of themselves or of others."""
    if isinstance(choice, UniformFull):
        return {path for chunk in chunks for path in chunk[:: choice.num_layers]} | {*heads}
    assert isinstance(choice, BlockFull), "only full recompute has inputs of layers to distribute"
    return {path for chunk in chunks for path in chunk[: choice.num_layers]}


def _with_inputs_as_parts(
    profile: Profile, units: Mapping[str, UnitPlan], layers: Collection[str]
) -> dict[str, UnitPlan]:
    """Return a plan's units with the inputs of some layers held as parts.

    Like Megatron, which distributes only the first argument of a region: arguments that other layers also read, such
    as rotary positions, are kept whole.
    """
    if profile.shard_ranks == 1:
        raise ConfigError(
            settings={"distribute_saved_activations": True},
            reason="the step was recorded without ranks to distribute to",
            advice="Call recollect.distribute_saved_activations(model, group) before recollect.record, with the ranks of "
            "tensor parallelism; `recollect train` does.",
        )
    num_readers = Counter(
        (call, value) for other in profile.calls if other.repeated for _, call, value in set(other.origins)
    )
    found = dict(units)
    for reader in profile.calls:
        if reader.path not in layers:
            continue
        for _, origin, value in reader.origins:
            if num_readers[origin, value] > 1:
                continue
            maker = profile.calls[origin]
            graph = profile.graph_of(maker)
            unit = found.get(maker.path) or keep_all_unit(graph)
            found[maker.path] = replace(unit, actions={**unit.actions, graph.values[value].name: Action.SHARD})
    return found


def _is_head(path: str) -> bool:
    return "mtp" in path.split(".")


def _chunks(profile: Profile, setting: TrainingSetting | None) -> Chunks:
    """Return the layers of each model chunk: the layers of one parent module, cut by the pipeline."""
    blocks: dict[str, list[str]] = {}
    for path in dict.fromkeys(call.path for call in profile.calls if call.repeated and not _is_head(call.path)):
        blocks.setdefault(path.rpartition(".")[0], []).append(path)
    if setting is None or setting.pipeline_model_parallel_size == 1 and not setting.num_layers:
        return list(blocks.values())
    num_stages = setting.pipeline_model_parallel_size
    if setting.num_layers and num_stages > 1:
        sizes, found = chunk_sizes(setting, setting.num_layers), [len(paths) for paths in blocks.values()]
        if any(found == sizes[stage::num_stages] for stage in range(num_stages)):
            return list(blocks.values())  # what one rank of the pipeline has
    if len(blocks) > 1 and setting.pipeline_model_parallel_size > 1:
        raise ConfigError(
            settings={"pipeline_model_parallel_size": setting.pipeline_model_parallel_size},
            reason=f"the layers stand in {len(blocks)} blocks, {', '.join(blocks)}, and a pipeline cuts one",
            advice="Leave it at 1.",
        )
    result: list[list[str]] = []
    for name, paths in blocks.items():
        if setting.num_layers not in (None, len(paths)):
            raise ConfigError(
                settings={"num_layers": setting.num_layers},
                reason=f"the recorded model has {len(paths)} layers in {name or 'it'}",
                advice=f"Set it to {len(paths)}, or record the model that is meant.",
            )
        result += [[paths[i] for i in layers] for layers in model_chunks(setting, len(paths))]
    return result


def _selective_units(layers: Mapping[str, UnitGraph], outputs: Mapping[str, Action]) -> dict[str, UnitPlan]:
    """Return the units whose modules are recomputed; `outputs` says what happens to the output of each."""
    made: dict[int, UnitPlan] = {}
    matched: set[str] = set()
    units = {}
    for path, graph in layers.items():
        if id(graph) not in made:
            layer = LayerOps(graph)
            parts = {name: part for name in outputs if (part := values_of_module(layer, name))}
            matched.update(parts)
            made[id(graph)] = _unit(layer, outputs, parts)
        units[path] = made[id(graph)]
    _check_matched("recompute", tuple(outputs), matched)
    return units


def _unit(layer: LayerOps, outputs: Mapping[str, Action], parts: Mapping[str, frozenset[int]]) -> UnitPlan:
    # Megatron saves their sources: this rank's part of a gathered tensor, and the router's input in 16 bits.
    dropped = {*layer.gathered, *layer.cast_for_router}
    for name, inside in parts.items():
        dropped |= inside if outputs[name] == Action.RECOMPUTE else inside - layer.outputs_of(inside)
    actions: dict[str, Action] = {
        value.name: Action.RECOMPUTE if index in dropped and not value.must_keep else Action.KEEP
        for index, value in layer.graph.made
    }
    return UnitPlan(actions)


def _check_matched(verb: str, names: Sequence[str], matched: Collection[str]) -> None:
    missing = [name for name in names if name not in matched]
    if not missing:
        return
    if len(missing) == len(names):
        raise ConfigError(
            rule="modules-not-there",
            settings={f"{verb}_modules": tuple(names)},
            reason=f"no layer of this model has {' or '.join(missing)}",
            advice="docs/megatron.md says which module paths each name stands for.",
        )
    warn_user(
        f"no layer of this model has {' or '.join(missing)}; of {' '.join(names)} the others are "
        f"{'recomputed' if verb == 'recompute' else 'offloaded'}",
        ConfigWarning,
    )


def megatron_stage_plans(
    profiles: Sequence[Profile], schedule: Any, config: RecomputeConfig
) -> tuple[Plan | tuple[Plan, ...], ...]:
    """Return the plans that a Megatron configuration means for the stages of a pipeline, for `predict_pipeline` and `apply`.

    `recompute_num_layers` counts in each stage, virtual ones too, as each is a separate block of layers there.

    With `num_microbatches_with_partial_activation_checkpoints` = N, a rank takes its forwards in windows of as many as it runs
    before its first backward. The first N of a window recompute as the other settings say; the rest recompute all layers of
    their stage. With `uniform` that is the same, and with `selective` every layer recomputes its modules either way.

    Raises:
        ScheduleError: not one profile for each stage, or a schedule that cannot run.
        ArgumentError, ConfigError, NotYetError: as `megatron_plan`.

    Example:
        >>> import torch, recollect
        >>> from torch import nn
        >>> stage = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)))
        >>> x = torch.randn(16, 32, requires_grad=True)
        >>> profile = recollect.record(
        ...     stage, x, loss_fn=torch.sum, gradients="accumulated", holds_output=False, fake=True
        ... )
        >>> schedule = recollect.PipelineSchedule.one_f_one_b(num_stages=2, num_micro_batches=4)
        >>> config = RecomputeConfig(
        ...     recompute_granularity="full",
        ...     recompute_method="block",
        ...     recompute_num_layers=1,
        ...     num_microbatches_with_partial_activation_checkpoints=1,
        ... )
        >>> plans = megatron_stage_plans([profile] * 2, schedule, config)
        >>> [plan.note for plan in plans[0]]
        ['Megatron: full, block, 1', 'Megatron: full, block, 4', 'Megatron: full, block, 1', 'Megatron: full, block, 4']
        >>> recollect.predict_pipeline([profile] * 2, schedule, plans).slowdown > 0
        True
    """
    function = "megatron_stage_plans(profiles, schedule, config)"
    check_kind(function, "config", config, RecomputeConfig, "recollect.RecomputeConfig")
    found = schedule_of(schedule)
    if len(profiles) != found.num_stages:
        raise ScheduleError(
            f"got {len(profiles)} profiles for a schedule of {found.num_stages} stages, expected one for each"
        )
    alike = replace(config, num_microbatches_with_partial_activation_checkpoints=None)
    refuse_not_yet(alike, TrainingSetting(pipeline_model_parallel_size=found.num_stages))
    num_partial = config.num_microbatches_with_partial_activation_checkpoints
    distinct = {id(profile): profile for profile in profiles}
    partial = {key: megatron_plan(profile, alike) for key, profile in distinct.items()}
    if num_partial is None or not isinstance(config.choice, BlockFull):
        return tuple(partial[id(profile)] for profile in profiles)
    rest = {key: _of_all_layers(profile, alike) for key, profile in distinct.items()}
    made: dict[int, dict[int, Plan]] = {stage: {} for stage in range(found.num_stages)}
    for actions in found.ranks:
        window = sum(1 for _ in takewhile(lambda action: action.kind == FORWARD, actions))
        for number, action in enumerate(action for action in actions if action.kind == FORWARD):
            plans = partial if number % window < num_partial else rest
            made[action.stage][action.micro_batch] = plans[id(profiles[action.stage])]
    return tuple(tuple(own[batch] for batch in sorted(own)) for own in made.values())


def _of_all_layers(profile: Profile, config: RecomputeConfig) -> Plan:
    layers = {call.path for call in profile.calls if call.repeated}
    return megatron_plan(profile, replace(config, recompute_num_layers=max(1, len(layers))))
