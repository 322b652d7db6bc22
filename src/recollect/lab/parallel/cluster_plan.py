"""Plan a training step on a cluster: a plan for each stage, its layers and loss chunks, and memory and time of each rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from recollect.byte_format import format_bytes
from recollect.lab.parallel.cluster_step import (
    Axis,
    ClusterStep,
    RecordedStages,
    record_stages,
    schedule_of_step,
    send_s,
)
from recollect.lab.parallel.pipeline_layout import clash
from recollect.pipelines.pipeline import PipelinePlan
from recollect.pipelines.plan_pipeline import plan_pipeline
from recollect.pipelines.schedule import INPUT
from recollect.pipelines.split_pipeline import PipelineSplit, split_pipeline
from recollect.planning.loss_chunks import fewest_chunks
from recollect.plans.plan import Plan


@dataclass(frozen=True)
class RankUse:
    """Memory that a rank of the pipeline needs in a step."""

    stages: tuple[int, ...]
    peak_bytes: int
    held_bytes: Mapping[str, int]
    """Those of its "parameters", "gradients" and "optimizer_state"."""
    compute_s: float
    """Seconds of forward and backward."""
    recompute_s: float
    communication_s: Mapping[str, float]
    """Collectives by axis; those for "data" parallelism overlap with computation."""
    waiting_s: float
    """The pipeline's bubble: seconds of waiting for other stages and their messages."""


@dataclass(frozen=True, repr=False)
class ClusterPlan:
    """Plans for a step on a cluster."""

    step: ClusterStep
    stages: RecordedStages
    planned: PipelinePlan
    ranks: tuple[RankUse, ...]
    """The needs of each pipeline rank; its peers in tensor and data parallelism need the same."""
    split: PipelineSplit | None = None
    """How the layers of its stages were chosen, if they were."""

    @property
    def plans(self) -> tuple[Plan, ...]:
        # Only plans that a user gives may differ from micro-batch to micro-batch.
        return tuple(plan for plan in self.planned.plans if isinstance(plan, Plan))

    @property
    def step_s(self) -> float:
        """Seconds of the step: the pipeline's, plus the part of data parallelism that does not overlap."""
        beside = (use.communication_s["data"] - use.compute_s - use.recompute_s for use in self.ranks)
        return self.planned.step_s + max(0.0, *beside)

    @property
    def slowdown(self) -> float:
        return self.planned.slowdown

    @property
    def budget_bytes(self) -> int | None:
        return self.planned.budget_bytes

    def __repr__(self) -> str:
        layout = self.step.layout
        # Only where there is one; of tensor parallelism always.
        more = ["context"] * (layout.context_parallel_size > 1) + ["expert"] * (layout.expert_model_parallel_size > 1)
        lines = [
            f"{self.step.layout.num_devices} x {self.step.cluster.hardware.name}: peak "
            f"{format_bytes(self.planned.peak_bytes)} a device, step {1e3 * self.step_s:,.0f} ms "
            f"({self.planned.slowdown:+.1%} by recompute)",
            f"{'rank':>4} {'peak':>9} {'weights':>9} {'gradients':>9} {'optimizer':>9}"
            + "".join(f" {name:>9}" for name in ("compute", "recompute", "tensor", *more, "waiting", "data")),
        ]
        for number, use in enumerate(self.ranks):
            waits_s = [use.communication_s[name] for name in ("tensor", *more)]
            times = (use.compute_s, use.recompute_s, *waits_s, use.waiting_s, use.communication_s["data"])
            sizes = (use.peak_bytes, *use.held_bytes.values())
            cells = [f"{format_bytes(size):>9}" for size in sizes] + [f"{1e3 * time:6,.0f} ms" for time in times]
            lines.append(" ".join([f"{number:>4}", *cells]))
        if self.split is not None:
            lines.append(self.split.summary)
        return "\n".join(lines)

    def assumptions(self) -> list[str]:
        step, cluster = self.step, self.step.cluster
        wide = "gradients, master weights and moments of AdamW in fp32" if step.dtype == "bf16" else "AdamW in fp32"
        shared = {
            "none": "each rank holds all of them",
            "optimizer": "the optimizer's are shared over data parallelism",
        }
        engine = {
            "torch": "Pipelines as torch.distributed.pipelining runs them, with receive buffers for all micro-batches and "
            "return_outputs=False: the last stage returns its loss",
            "megatron": "Pipelines as Megatron runs them, which frees what it received and sent",
        }
        is_sent_by_all = step.layout.tensor_model_parallel_size > 1 and not step.layout.has_whole_experts
        routing = (
            "Each expert gets as many tokens as any other; a token's row is sent once for each of its experts, to all ranks "
            "that share experts alike"
            f"{', by all ranks of tensor parallelism' if is_sent_by_all else ''}."
        )
        reduction = (
            "FSDP2 gathers the weights of a stage once a step, and reduces its gradients at the end, as in "
            "torch.distributed.pipelining with reshard_after_forward=False; both are there whole in between."
        )
        return [
            f"{step.num_micro_batches} x {step.micro_batch_size} sequences of {step.seq_length} tokens on each rank of data "
            f"parallelism; {step.dtype} weights and activations; {wide}, of which "
            f"{shared.get(step.sharding, 'all are shared over data parallelism (FSDP2)')}.",
            f"{cluster.devices_per_node} devices a node; {cluster.within.name} within, {cluster.between.name} between: "
            f"{cluster.within.bytes_per_s / 1e9:.0f} and {cluster.between.bytes_per_s / 1e9:.0f} GB/s a device. Groups with "
            "several devices in a node use the network adapters of all of them.",
            "The computation waits for collectives of tensor, context and expert parallelism; those of data parallelism run "
            "beside it.",
            *([routing] if step.config.num_moe_experts is not None else []),
            *([f"LM head and loss in {step.loss_chunks} chunks."] if step.loss_chunks > 1 else []),
            *([f"{engine[step.pipeline_engine]}."] if len(self.ranks) > 1 else []),
            *([reduction] if step.sharding == "all" and len(self.ranks) > 1 else []),
            "Not counted: the optimizer's workspace and time, buffers of NCCL and DDP, the CUDA context.",
        ]


def plan_cluster(step: ClusterStep, budget: int | str, *, chooses_split: bool = False) -> ClusterPlan:
    """Record the stages of a step on fake tensors, and choose a plan for each under one budget a device."""
    split = None
    if chooses_split:
        split = choose_split(step, budget)
        step, budget = with_split(step, split.sizes), split.pipeline.budget_bytes or budget
    stages = record_stages(step)
    planned = plan_pipeline(
        stages.profiles, schedule_of_step(step), budget, split_profiles=stages.split_profiles, send_s=send_s(step)
    )
    ranks = tuple(_use(step, stages, planned, rank) for rank in range(step.layout.pipeline_model_parallel_size))
    return ClusterPlan(step, stages, planned, ranks, split)


def _use(step: ClusterStep, stages: RecordedStages, planned: PipelinePlan, rank: int) -> RankUse:
    own = planned.schedule.stages_of(rank)
    halves = stages.split_profiles
    # With the backward that a stage runs, or runs most if it runs both kinds.
    own_s = {
        stage: (halves if halves and planned.schedule.backwards_of(stage) == {INPUT} else stages.profiles)[stage].step_s
        for stage in own
    }
    busy_s = step.num_micro_batches * sum(own_s.values())
    recompute_s = step.num_micro_batches * sum(planned.slowdowns[stage] * own_s[stage] for stage in own)
    communicating = {
        axis: step.num_micro_batches * sum(t[axis].time_s for stage in own if axis in (t := stages.traffic[stage]))
        for axis in get_args(Axis)
    }
    waits_s = sum(communicating[axis] for axis in ("tensor", "context", "expert"))
    communicating["data"] += sum(stages.reduction_s[stage] for stage in own)
    return RankUse(
        stages=own,
        peak_bytes=planned.peaks_bytes[rank],
        held_bytes={
            kind: sum(stages.profiles[stage].persistent.get(kind, 0) for stage in own)
            for kind in ("parameters", "gradients", "optimizer_state")
        },
        compute_s=busy_s - waits_s,
        recompute_s=recompute_s,
        communication_s=communicating,
        waiting_s=max(0.0, planned.step_s - busy_s - recompute_s),
    )


def choose_split(step: ClusterStep, budget: int | str) -> PipelineSplit:
    """Return the layers per stage that give the shortest step found within the budget.

    Single layers are recorded, the first with the embedding and the last with norm, LM head and loss.
    """
    layout, num_layers = step.layout, step.config.num_layers
    layout.check_only_split("auto", others=("pipeline_split",))
    ranks, num_stages = layout.pipeline_model_parallel_size, layout.num_stages(num_layers)
    if ranks == 1 or num_layers < num_stages:
        clash(
            {"pipeline_split": "auto", "num_layers": num_layers, "pipeline_model_parallel_size": ranks},
            f"there are {num_stages} stages to divide the layers among",
            "Use two ranks of the pipeline or more, and as many layers as stages at least.",
        )
    each, rest = divmod(num_layers, num_stages)
    even = with_split(step, [each + (stage < rest) for stage in range(num_stages)])
    layers = record_stages(even, [range(layer, layer + 1) for layer in range(num_layers)])
    return split_pipeline(
        layers.profiles,
        schedule_of_step(even),
        budget,
        split_layers=layers.split_profiles,
        send_s=send_s(even),
    )


def with_split(step: ClusterStep, sizes: Sequence[int]) -> ClusterStep:
    layout = replace(step.layout, num_layers_per_virtual_pipeline_stage=None, pipeline_split=tuple(sizes))
    return replace(step, layout=layout)


def plan_cluster_with_chunks(step: ClusterStep, budget: int | str, *, chooses_split: bool = False) -> ClusterPlan:
    return fewest_chunks(
        lambda count, amount: plan_cluster(replace(step, loss_chunks=count), amount, chooses_split=chooses_split),
        budget,
    )
