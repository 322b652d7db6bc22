"""The schedule of a step on a cluster, and what its stages send."""

from __future__ import annotations

from dataclasses import replace

from recollect.errors import ConfigError
from recollect.lab.parallel.cluster_step import ClusterStep
from recollect.lab.parallel.torch_schedule import torch_schedule
from recollect.pipelines.schedule import Loop, PipelineSchedule

__all__ = ["schedule_of_step", "send_s"]


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
