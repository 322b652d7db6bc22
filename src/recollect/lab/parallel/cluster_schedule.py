"""The schedule of a step on a cluster, as torch or Megatron runs it, and what its stages send."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from recollect._torch_parallel import fake_process_group
from recollect.errors import ConfigError
from recollect.lab.parallel.cluster_step import ClusterStep
from recollect.lab.parallel.layout import DeviceLayout
from recollect.pipelines.schedule import Loop, PipelineSchedule, schedule_of

__all__ = ["schedule_of_step", "send_s", "torch_schedule"]


def schedule_of_step(step: ClusterStep) -> PipelineSchedule:
    """Return the schedule of a step; by default 1F1B, interleaved where a rank has several stages.

    Raises:
        ConfigError: micro-batches that the schedule does not take; a schedule that Megatron has not, with its engine.
        RecordError: this process is part of a real process group, and torch has to write the schedule.
    """
    layout = step.layout
    ranks, name = layout.pipeline_model_parallel_size, layout.pipeline_parallel_schedule
    num_stages = len(layout.layers_of_stages(step.config.num_layers))
    if name not in (None, "1F1B", "Interleaved1F1B"):
        if step.pipeline_engine == "megatron":
            raise ConfigError(
                settings={"pipeline_parallel_schedule": name, "pipeline_engine": "megatron"},
                reason="Megatron has 1F1B and Interleaved1F1B alone",
                advice="Choose one of these, or the engine torch.",
            )
        return torch_schedule(layout, num_stages=num_stages, num_micro_batches=step.num_micro_batches)
    schedule = PipelineSchedule.interleaved_1f1b(
        num_ranks=ranks, stages_per_rank=num_stages // ranks, num_micro_batches=step.num_micro_batches
    )
    return schedule if step.pipeline_engine == "torch" else replace(schedule, loop=Loop.ONE_F_ONE_B)


def send_s(step: ClusterStep) -> float:
    """Return the seconds in which a micro-batch gets from one stage to the next."""
    if step.layout.pipeline_model_parallel_size == 1:
        return 0.0
    parts = step.layout.tensor_model_parallel_size if step.layout.sequence_parallel else 1
    parts *= step.layout.context_parallel_size
    elements = step.micro_batch_size * step.seq_length * step.config.hidden_size // parts
    nbytes = elements * (2 if step.dtype == "bf16" else 4)
    return step.cluster.send_s(nbytes, (step.first_rank(0), step.first_rank(1)))


def torch_schedule(layout: DeviceLayout, *, num_stages: int, num_micro_batches: int) -> PipelineSchedule:
    """Return what torch runs under the schedule of a layout, which has one; as its own classes write it.

    Args:
        layout: with a pipeline of several ranks.
        num_stages: those of all ranks together.
        num_micro_batches: of a step.

    Raises:
        ConfigError: torch takes no such number of stages or micro-batches.
        RecordError: this process is part of a real process group.

    Example:
        >>> layout = DeviceLayout(pipeline_model_parallel_size=2, pipeline_parallel_schedule="ZBVZeroBubble")
        >>> torch_schedule(layout, num_stages=4, num_micro_batches=4).stages_of(0)
        (0, 3)
    """
    name, ranks = layout.pipeline_parallel_schedule, layout.pipeline_model_parallel_size
    assert name is not None
    made = get_schedule_class(name)
    with fake_process_group(0, ranks):
        # What the stages compute is of no interest to the order.
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
                advice="Change the global batch size, or choose another schedule.",
            ) from None
        return schedule_of(found)
