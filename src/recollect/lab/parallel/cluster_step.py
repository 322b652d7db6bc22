"""A training step on a cluster that does not exist: the schedule of its pipeline, and a record of each distinct stage.

The schedule is torch's or Megatron's. A stage is recorded as one of its ranks runs it.
"""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.distributed.tensor import DTensor

from recollect._torch_parallel import fake_process_group
from recollect.costs.links import Cluster, CollectiveKind
from recollect.costs.modelled_costs import ModelledCosts, Traffic
from recollect.engine.together import distribute_saved_activations
from recollect.errors import ConfigError, ConfigWarning
from recollect.lab.models.config import TransformerConfig
from recollect.lab.parallel.layout import DeviceLayout, Sharding
from recollect.lab.parallel.mesh import LayoutMesh, data_parallel, layout_mesh, share_model
from recollect.lab.parallel.pipeline_step import received
from recollect.lab.parallel.stages import LossStage
from recollect.pipelines.schedule import Loop, PipelineSchedule, schedule_of
from recollect.profile.profile import Profile
from recollect.recording.model_step import Step
from recollect.recording.record import record_with
from recollect.recording.restored_state import gathered_stage
from recollect.warning import warn_user

Axis = Literal["tensor", "context", "expert", "data"]
"""The axes along which ranks communicate. Where two have the same ranks, communication of both counts for the first."""

# Megatron's mixed precision: bf16 weights; gradients, master weights and AdamW's two moments in fp32.
_WIDE_BYTES = 4
_MOMENTS = 2


@dataclass(frozen=True, kw_only=True)
class ClusterStep:
    """A training step on many devices."""

    config: TransformerConfig
    layout: DeviceLayout
    cluster: Cluster
    micro_batch_size: int = 1
    seq_length: int = 4096
    num_micro_batches: int = 1
    """Micro-batches in a step, on each rank of data parallelism."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Of weights and activations; with bf16, gradients, master weights and moments are fp32."""
    sharding: Sharding = "none"
    pipeline_engine: Literal["torch", "megatron"] = "torch"
    """"torch" receives into buffers for all micro-batches and holds sent tensors, as torch's schedules do; "megatron"
    frees received and sent tensors."""
    holds_parts: bool = False
    """Plans may have the ranks of tensor parallelism hold parts of values that are the same on all of them."""
    loss_chunks: int = 1
    """Number of parts in which the last stage computes LM head and loss."""

    @property
    def narrow(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == "bf16" else torch.float32

    @property
    def gathers_once(self) -> bool:
        """Whether FSDP2 gathers weights once a step and reduces gradients once, as it does in the stages of a pipeline."""
        return self.sharding == "all" and self.layout.pipeline_model_parallel_size > 1

    def first_rank(self, stage: int) -> int:
        layout = self.layout
        return layout.rank_of_stage(stage) * layout.num_devices // layout.pipeline_model_parallel_size

    def group(self, axis: Axis | Literal["replicas"], stage: int) -> tuple[int, ...]:
        """Return the ranks of the first group of an axis that runs a stage; of "data", those with parts of sequences, too."""
        layout, first = self.layout, self.first_rank(stage)
        tensor, experts = layout.tensor_model_parallel_size, layout.expert_model_parallel_size
        ranks = layout.data_parallel_size * layout.context_parallel_size
        split = 1 if layout.has_whole_experts else tensor
        apart, count = {
            "tensor": (1, tensor),
            "context": (tensor, layout.context_parallel_size),
            "expert": (split, experts),
            "data": (tensor, ranks),
            "replicas": (split * experts, tensor * ranks // (split * experts)),
        }[axis]
        return tuple(range(first, first + apart * count, apart))


@dataclass(frozen=True)
class RecordedStages:
    """The stages of a step."""

    profiles: tuple[Profile, ...]
    """One for each stage, of one micro-batch, as one rank of it runs it; stages that are alike share one."""
    split_profiles: tuple[Profile, ...]
    """The same with a backward in two halves, where the schedule splits it; else none."""
    traffic: tuple[Mapping[str, Traffic], ...]
    """The communication of each for a micro-batch, by axis."""
    reduction_s: tuple[float, ...]
    """Seconds to reduce the gradients of each once a step, and to gather its weights."""


def record_stages(step: ClusterStep, pieces: Sequence[range] | None = None) -> RecordedStages:
    """Record the stages of a step on fake tensors, as ranks of a process group without the others."""
    if step.num_micro_batches < 1:
        raise ConfigError(
            settings={"num_micro_batches": step.num_micro_batches},
            reason="each rank of data parallelism has at least one micro-batch a step",
            advice="Raise the global batch size, or use fewer ranks of data parallelism.",
        )
    tensor, sequence = step.layout.tensor_model_parallel_size, step.layout.sequence_parallel
    if step.holds_parts and (tensor == 1 or sequence):
        sizes = {"tensor_model_parallel_size": tensor, "sequence_parallel": sequence}
        raise ConfigError(
            settings={"distribute_saved_activations": True, **sizes},
            reason="it is about what all ranks of tensor parallelism hold alike, which sequence parallelism splits already",
            advice="Leave it out, or use tensor parallelism without sequence parallelism.",
        )
    cluster = step.cluster
    if tensor > cluster.devices_per_node:
        warn_user(
            f"tensor_model_parallel_size={tensor}: a node has {cluster.devices_per_node} devices; the computation waits for "
            f"{cluster.between.name}, at {cluster.between.bytes_per_s / 1e9:.0f} GB/s a device. Use a pipeline instead.",
            ConfigWarning,
        )
    step.layout.check_model(step.config, seq_length=step.seq_length)
    stages = step.layout.layers_of_stages(step.config.num_layers)
    known: dict[tuple[object, ...], tuple[Profile, Profile, Mapping[str, Traffic], int]] = {}
    found = []
    numbered = list(enumerate(stages))
    if pieces is not None:
        numbered = [(next(n for n, own in numbered if layers.start in own), layers) for layers in pieces]
    for number, layers in numbered:
        is_first = layers.start == 0 and number == 0
        is_last = layers.stop == step.config.num_layers and number == len(stages) - 1
        of_layers = ((step.config.is_moe_layer(layer), step.config.of_layer(layer).fp8) for layer in layers)
        kind = is_first, is_last, *of_layers
        if kind not in known:
            profile, traffic, experts = _record_stage(step, number, layers, (is_first, is_last))
            halves = profile
            # The first stage, whose tokens need no gradient, runs a whole backward under any schedule.
            if step.layout.splits_backward and not is_first:
                halves, *_ = _record_stage(step, number, layers, (is_first, is_last), split_backward=True)
            known[kind] = profile, halves, traffic, experts
        profile, halves, traffic, experts = known[kind]
        found.append((profile, halves, traffic, _reduction_s(step, number, profile, experts)))
    profiles, split_profiles, traffics, reductions_s = zip(*found, strict=True)
    return RecordedStages(profiles, split_profiles if step.layout.splits_backward else (), traffics, reductions_s)


def _record_stage(
    step: ClusterStep, number: int, layers: range, ends: tuple[bool, bool], *, split_backward: bool = False
) -> tuple[Profile, Mapping[str, Traffic], int]:
    with fake_process_group(step.first_rank(number), step.layout.num_devices), warnings.catch_warnings():
        # FSDP2 warns of logits and of experts' results that are views, which nothing writes to here.
        warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module", category=UserWarning)
        model = _built(step, layers, ends, layout_mesh(step.layout))
        tokens = torch.zeros(step.micro_batch_size, step.seq_length, dtype=torch.int64, device="meta")
        axes = {axis: step.group(axis, number) for axis in get_args(Axis)}
        # Experts have fewer replicas.
        replicas = step.group("replicas", number)
        groups = {replicas: "data"} | {ranks: axis for axis, ranks in reversed(axes.items())}
        hidden = (
            [ranks for ranks in (axes["data"], replicas) if groups[ranks] == "data"] if step.sharding == "all" else []
        )
        costs = ModelledCosts(step.cluster.hardware, step.cluster, hidden=hidden)
        micro_step = Step(
            model,
            model.micro_batch(received(model, tokens.shape), tokens, labels=tokens),
            optimizer=torch.optim.AdamW(model.parameters()) if step.sharding == "all" else None,
            loss_fn=None if model.is_last else torch.sum,
            holds_output=False,
            gradients="accumulated",
            split_backward=split_backward,
            loss_chunks=step.loss_chunks if model.is_last else 1,
        )
        profile = record_with(
            costs,
            micro_step,
            units=[f"decoder.layers.{index}" for index in range(len(layers))] or ["decoder"],
            # Megatron's ranks run them again, too; all ranks of a layout get one plan.
            collectives="replay",
            within=gathered_stage(model) if step.gathers_once else nullcontext(),
        )
    traffic = {groups[ranks]: one for ranks, one in costs.traffic.items() if len(ranks) > 1}
    experts = sum(
        parameter.to_local().numel()
        for name, parameter in model.named_parameters()
        if ".experts." in name and isinstance(parameter, DTensor)
    ) * (len(replicas) if step.sharding == "all" else 1)
    return replace(profile, persistent=_persistent(step, profile, experts)), traffic, experts


def _built(step: ClusterStep, layers: range, ends: tuple[bool, bool], mesh: LayoutMesh) -> LossStage:
    with torch.device("meta"):
        model = LossStage(step.config, layers, ends)
    model.compute_dtype = step.narrow
    # FSDP2 shards the weights that the optimizer steps over, and gathers them in the narrow dtype.
    model = model.to(torch.float32 if step.sharding == "all" else step.narrow).train()
    share_model(model, step.layout, mesh, balanced=True)
    if step.holds_parts:
        distribute_saved_activations(model, mesh.tensor.get_group())
    if step.sharding == "all":
        precision = MixedPrecisionPolicy(param_dtype=step.narrow, reduce_dtype=torch.float32)
        data_parallel(
            model,
            mesh.gradients,
            expert_mesh=mesh.replicas,
            precision=precision,
            reshard_after_forward=not step.gathers_once,
        )
    return model


def _persistent(step: ClusterStep, profile: Profile, experts: int) -> dict[str, int]:
    """Return the bytes that live through the whole step, with the step's dtypes and sharding."""
    found: dict[str, int] = dict(profile.persistent)
    if step.sharding != "all":
        count = profile.persistent["parameters"] // step.narrow.itemsize
        wide = _WIDE_BYTES * count
        copies = _MOMENTS + (step.dtype == "bf16")
        state = {"data": _WIDE_BYTES * (count - experts) * copies, "replicas": _WIDE_BYTES * experts * copies}
        ranks = {axis: len(step.group(axis, 0)) if step.sharding == "optimizer" else 1 for axis in ("data", "replicas")}
        found |= {"gradients": wide, "optimizer_state": sum(-(-state[axis] // ranks[axis]) for axis in state)}
    if step.pipeline_engine == "megatron":
        found["batch"] = 0
    return found


def _reduction_s(step: ClusterStep, number: int, profile: Profile, experts: int) -> float:
    if step.sharding == "all" and not step.gathers_once:
        return 0.0  # in each micro-batch, and in the recorded traffic
    count = profile.persistent["gradients"] // _WIDE_BYTES
    parts = {step.group("data", number): count - experts, step.group("replicas", number): experts}
    if step.layout.expert_model_parallel_size == 1:
        parts = {step.group("data", number): count}
    kinds: dict[CollectiveKind, int] = {"all_gather": step.narrow.itemsize, "reduce_scatter": _WIDE_BYTES}
    if step.sharding == "none":
        kinds = {"all_reduce": _WIDE_BYTES}

    def parts_s(ranks: tuple[int, ...], count: int) -> float:
        return sum(step.cluster.collective_s(kind, each * count, ranks) for kind, each in kinds.items())

    return sum(parts_s(ranks, n) for ranks, n in parts.items() if n)


def schedule_of_step(step: ClusterStep) -> PipelineSchedule:
    """Return the schedule of a step; by default 1F1B, interleaved where a rank has several stages."""
    layout = step.layout
    ranks, name = layout.pipeline_model_parallel_size, layout.pipeline_parallel_schedule
    num_stages = len(layout.layers_of_stages(step.config.num_layers))
    if name not in (None, "1F1B", "Interleaved1F1B"):
        if step.pipeline_engine == "megatron":
            raise ConfigError(
                settings={"pipeline_parallel_schedule": name, "pipeline_engine": "megatron"},
                reason="Megatron has only 1F1B and Interleaved1F1B",
                advice="Choose one of these, or the engine torch.",
            )
        return torch_schedule(layout, num_stages=num_stages, num_micro_batches=step.num_micro_batches)
    schedule = PipelineSchedule.interleaved_1f1b(
        num_ranks=ranks, stages_per_rank=num_stages // ranks, num_micro_batches=step.num_micro_batches
    )
    loop = schedule.loop if step.pipeline_engine == "torch" else Loop.ONE_F_ONE_B
    return replace(schedule, loop=loop, return_outputs=False)


def send_s(step: ClusterStep) -> float:
    """Return the seconds to send a micro-batch from one stage to the next."""
    if step.layout.pipeline_model_parallel_size == 1:
        return 0.0
    parts = step.layout.tensor_model_parallel_size if step.layout.sequence_parallel else 1
    parts *= step.layout.context_parallel_size
    elements = step.micro_batch_size * step.seq_length * step.config.hidden_size // parts
    return step.cluster.send_s(elements * step.narrow.itemsize, (step.first_rank(0), step.first_rank(1)))


def torch_schedule(layout: DeviceLayout, *, num_stages: int, num_micro_batches: int) -> PipelineSchedule:
    """Return torch's own actions for the layout's schedule, which must have one, without outputs."""
    name, ranks = layout.pipeline_parallel_schedule, layout.pipeline_model_parallel_size
    assert name is not None
    made = get_schedule_class(name)
    with fake_process_group(0, ranks):
        # The order does not depend on the stages' work.
        stages = [
            PipelineStage(nn.Identity(), stage, num_stages, torch.device("cpu"))
            for stage in range(num_stages)
            if layout.rank_of_stage(stage) == 0
        ]
        try:
            own = stages[0] if issubclass(made, PipelineScheduleSingle) else stages
            found = made(own, num_micro_batches, loss_fn=torch.sum)
        except ValueError as error:
            raise ConfigError(
                settings={
                    "pipeline_parallel_schedule": name,
                    "pipeline_model_parallel_size": ranks,
                    "num_micro_batches": num_micro_batches,
                },
                reason=f"torch.distributed.pipelining says: {str(error).rstrip('.')}",
                advice="Change the global batch size, or choose a different schedule.",
            ) from None
        return replace(schedule_of(found), return_outputs=False)
