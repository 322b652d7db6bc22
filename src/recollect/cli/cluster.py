"""`recollect plan --fake --tensor-model-parallel-size ...`: plan for a cluster on a machine without one."""

from dataclasses import replace
from pathlib import Path
from typing import Final

from rich.console import Console

from recollect.byte_format import format_bytes
from recollect.cli.commands import ClusterFlags, MakePlan
from recollect.cli.common import warn_of_model_flags, write_file
from recollect.costs.hardware_table import choose_hardware
from recollect.costs.links import cluster_of
from recollect.errors import ConfigError, NotYetError
from recollect.integrations.megatron.nearest import bridge_lines, megatron_flags, nearest_uniform_settings
from recollect.integrations.megatron.pipeline import chunk_sizes, layout_stages, num_virtual_stages, split_flags
from recollect.integrations.megatron.settings import TrainingSetting
from recollect.lab.models.config import TransformerConfig
from recollect.lab.parallel.cluster_plan import ClusterPlan, plan_cluster, plan_cluster_with_chunks
from recollect.lab.parallel.cluster_step import ClusterStep, send_s
from recollect.lab.parallel.layout import DeviceLayout
from recollect.lab.parallel.pipeline_layout import clash
from recollect.printing import columns_of, print_line

# Flags about the layers of stages: those that set all of them, and others.
_EACH: Final = "num_layers_per_virtual_pipeline_stage"
_WHOLE: Final = ("pipeline_split", _EACH, "pipeline_model_parallel_layout")
_COUNTED: Final = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_UNEVEN: Final = (
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("num_virtual_stages_per_pipeline_rank", *_COUNTED),
)


def run_cluster(command: MakePlan, console: Console) -> None:
    step = cluster_step(command)
    if command.write is not None:
        _check_written(step)
    make = plan_cluster_with_chunks if command.loss_chunks == "auto" else plan_cluster
    found = make(step, command.memory_budget, chooses_split=command.cluster.pipeline_split == "auto")
    print_line(console, str(found))
    plans = found.plans
    print_line(console, str(found.planned) if len(plans) > 1 else plans[0].to_text(columns_of(console)))
    if command.write is not None:
        print_line(console, _nearest(command, found))
    for sentence in found.assumptions():
        print_line(console, f"assumed: {sentence}")
    out = command.plan_file or Path("plan.json")
    for number, plan in enumerate(plans):
        path = out if len(plans) == 1 else out.with_suffix(f".{number}.json")
        write_file(path, plan.to_json() + "\n", console, flag="--out")


def _check_written(step: ClusterStep) -> None:
    """Check that Megatron, whose settings are to be written, takes the layout."""
    tensor, experts = step.layout.tensor_model_parallel_size, step.config.num_moe_experts
    if experts is not None and tensor > 1 and not step.layout.sequence_parallel:
        raise ConfigError(
            settings={"num_experts": experts, "tensor_model_parallel_size": tensor, "sequence_parallel": False},
            reason="Megatron does not train experts under tensor parallelism like this",
            advice="Add --sequence-parallel, or leave --write out.",
        )


def cluster_step(command: MakePlan) -> ClusterStep:
    flags, step = command.cluster, command.step
    if not step.fake:
        raise ConfigError(
            settings={"fake": False},
            reason="a layout of many devices is planned on a machine without them",
            advice="Add --fake; on the devices themselves use recollect.record on each rank (docs/parallel.md).",
        )
    unfit = {name: getattr(command, name) for name in ("png", "html", "largest")}
    unfit = {name: value for name, value in unfit.items() if value is not None}
    if command.write == "torchtitan":
        unfit["write"] = command.write
    if unfit:
        raise NotYetError(settings=unfit, needs="these for a layout of many devices", advice="Leave them out.")
    cluster = cluster_of(
        choose_hardware(step.hardware, own_device=""),
        within=flags.node.node_link,
        between=flags.node.network_link,
        devices_per_node=flags.node.devices_per_node,
        adapters_per_node=flags.node.adapters_per_node,
    )
    layout = _sizes(flags)
    config = _model(command)
    layout = _staged(layout, flags, config)
    return ClusterStep(
        config=config,
        layout=layout,
        cluster=cluster,
        micro_batch_size=step.num_sequences,
        seq_length=step.seq_length,
        num_micro_batches=_num_micro_batches(command, layout.data_parallel_size),
        dtype=step.dtype,
        sharding=flags.sharding,
        pipeline_engine=flags.pipeline_engine,
        holds_parts=flags.distribute_saved_activations,
        loss_chunks=1 if command.loss_chunks == "auto" else command.loss_chunks,
    )


def _model(command: MakePlan) -> TransformerConfig:
    """Return the model from the flags, or the reference model of a Hugging Face config, with separate projections."""
    step, parts = command.step, command.cluster.tensor_model_parallel_size
    if step.hf_config is None:
        # As in Megatron, each rank of tensor parallelism has a multiple.
        multiple = step.model.make_vocab_size_divisible_by * parts
        return replace(step.model, make_vocab_size_divisible_by=multiple).dimensions(seq_length=step.seq_length)
    from recollect.lab.models.hugging_face import read_config  # needs safetensors

    warn_of_model_flags(step.model)
    model_type, config = read_config(step.hf_config)
    return config.changed(separate_projections=model_type != "gpt2")  # whose c_attn is one matrix


def _sizes(flags: ClusterFlags) -> DeviceLayout:
    """Return the layout, with as many layers in each stage."""
    given = {"data_parallel_size": flags.data_parallel_size, "world_size": flags.world_size}
    layout = flags.layout(flags.data_parallel_size) if flags.world_size is None else flags.layout_of(flags.world_size)
    if flags.data_parallel_size not in (1, layout.data_parallel_size):
        clash(given, f"that leaves {layout.data_parallel_size} ranks of data parallelism", "Leave one of them out.")
    return layout


def _staged(layout: DeviceLayout, flags: ClusterFlags, config: TransformerConfig) -> DeviceLayout:
    """Return the layout with the layers of each stage where flags for uneven ones set them."""
    names = (*_WHOLE, *_UNEVEN)
    given = {name: value for name in names if (value := getattr(flags, name)) is not None and value is not False}
    if given.keys() <= {"pipeline_split", _EACH}:
        return layout
    # As in Megatron, only embedding and loss may count where the size of virtual stages is given.
    if given.keys() & set(_WHOLE) and len(given) > 1 and not given.keys() <= {_EACH, *_COUNTED}:
        clash(given, "each says how many layers stages have", "Leave all but one of them out.")
    stages = layout_stages(flags.pipeline_model_parallel_layout or "")
    if any("m" in stage and "L" not in stage for stage in stages):
        raise NotYetError(
            settings=given,
            needs="multi-token prediction on a different stage than the loss",
            advice="Put m and L on one stage, the last.",
        )
    ranks, each = flags.pipeline_model_parallel_size, flags.num_layers_per_virtual_pipeline_stage
    virtual = flags.num_virtual_stages_per_pipeline_rank
    if virtual is not None and virtual < 1:
        clash({"num_virtual_stages_per_pipeline_rank": virtual}, "it counts stages", "Pass 1 or more.")
    if each is not None:
        virtual = num_virtual_stages(config.num_layers + len(given.keys() & set(_COUNTED)), ranks, each)
    setting = TrainingSetting(
        pipeline_model_parallel_size=ranks,
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_model_parallel_layout=flags.pipeline_model_parallel_layout,
        num_layers_in_first_pipeline_stage=flags.decoder_first_pipeline_num_layers,
        num_layers_in_last_pipeline_stage=flags.decoder_last_pipeline_num_layers,
        account_for_embedding_in_pipeline_split=flags.account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=flags.account_for_loss_in_pipeline_split,
        mtp_num_layers=config.mtp_num_layers,
    )
    sizes = tuple(chunk_sizes(setting, config.num_layers))
    return replace(layout, num_layers_per_virtual_pipeline_stage=None, pipeline_split=sizes)


def _num_micro_batches(command: MakePlan, data_parallel_size: int) -> int:
    flags = command.cluster
    if flags.global_batch_size is None:
        ranks = flags.pipeline_model_parallel_size
        return 4 * ranks if ranks > 1 else 1
    at_once = command.step.num_sequences * data_parallel_size
    if flags.global_batch_size < 1 or flags.global_batch_size % at_once:
        raise ConfigError(
            settings={
                "global_batch_size": flags.global_batch_size,
                "micro_batch_size": command.step.num_sequences,
                "data_parallel_size": data_parallel_size,
            },
            reason=f"it is not a multiple of {at_once}, a micro-batch on each rank of data parallelism",
            advice="Choose a multiple.",
        )
    return flags.global_batch_size // at_once


def _nearest(command: MakePlan, found: ClusterPlan) -> str:
    """Return the nearest settings of Megatron for all stages alike, and their loss, as lines."""
    settings, uniform = nearest_uniform_settings(
        found.stages.profiles,
        found.planned,
        split_profiles=found.stages.split_profiles,
        send_s=send_s(found.step),
    )
    words = bridge_lines(settings) if command.write == "bridge" else megatron_flags(settings) or "no flags"
    lost_s = uniform.step_s - found.planned.step_s
    layout = found.step.layout
    if layout.pipeline_split is not None and not layout.is_v_shaped:
        predicted = found.step.config.mtp_num_layers or 0
        ranks = layout.pipeline_model_parallel_size
        words += f"\nits split of the layers:\n{split_flags(layout.pipeline_split, ranks, num_predicted=predicted)}"
    lines = [
        f"nearest of Megatron, in all stages alike: peak {format_bytes(uniform.peak_bytes)}, step {uniform.slowdown:+.1%}, "
        f"{1e3 * lost_s:.0f} ms longer",
        words,
        "assumed of Megatron: Norms, activations and positions op by op; its fused kernels keep less.",
    ]
    if layout.sequence_parallel or layout.context_parallel_size > 1:
        lines.append("assumed of Megatron: What it gathers again in backward, it gathers beside products.")
    return "\n".join(lines)
