"""The order in which `torch.distributed.pipelining` runs the stages of a layout."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from recollect._torch_parallel import fake_process_group
from recollect.errors import ConfigError
from recollect.lab.parallel.layout import DeviceLayout
from recollect.pipelines.schedule import PipelineSchedule, schedule_of

__all__ = ["torch_schedule"]


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
