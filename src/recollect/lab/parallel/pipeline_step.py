"""Run a step of a pipeline: the schedule of `torch.distributed.pipelining` over the stages of this rank."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from recollect.lab.parallel.stages import LossStage, PipelineRank
from recollect.pipelines.schedule import PipelineSchedule, schedule_of
from recollect.recording.restored_state import free_gathered

MicroBatch = tuple[Tensor, Tensor]


class PipelineStep:
    """The step of a rank of a pipeline: 1F1B, interleaved where it has several stages; `stages` are torch's, by number."""

    def __init__(
        self, rank: PipelineRank, mesh: DeviceMesh, num_stages: int, num_micro_batches: int, shape: tuple[int, int]
    ) -> None:
        self._rank, self._num_micro_batches = rank, num_micro_batches
        self.stages = {
            number: PipelineStage(
                stage,
                number,
                num_stages,
                next(rank.parameters()).device,
                # With these, no forward that routers would count runs before the first step.
                input_args=received(stage, shape),
                output_args=torch.empty((), device="meta") if stage.is_last else _between(stage, shape),
                group=mesh.get_group(),
            )
            for number, stage in rank.stages.items()
        }
        own: list[Any] = list(self.stages.values())
        # Gradients, including those of router losses, are divided by the number of micro-batches at the end.
        make: Any = ScheduleInterleaved1F1B
        if num_stages == mesh.size():
            make, (own,) = Schedule1F1B, own
        # The last stage has computed its loss.
        self._torch: Any = make(own, num_micro_batches, loss_fn=lambda loss, _labels: loss)

    @property
    def schedule(self) -> PipelineSchedule:
        return replace(schedule_of(self._torch), return_outputs=False)

    def gradients(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Run forward and backward of a step over tokens and labels, each int64 [B, T]; leaves gradients of the mean loss.

        Return the loss of each micro-batch in the last stage, and router losses in earlier stages; together they make the
        pipeline's loss.
        """
        stages = self._rank.stages.values()
        for stage in stages:
            stage.router_losses.clear()  # losses of a recorded step
        losses = self._run(self._torch.step, batches)
        return [*losses, *(loss for stage in stages for loss in stage.router_losses)]

    def losses(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Run forward only; return the loss of each micro-batch, of a rank without the last stage none."""
        found: list[Tensor] = []
        for first in range(0, len(batches), self._num_micro_batches):
            own = list(batches[first : first + self._num_micro_batches])
            full = [*own, *[own[-1]] * (self._num_micro_batches - len(own))]
            found += self._run(self._torch.eval, full)[: len(own)]
        for stage in self._rank.stages.values():
            free_gathered(stage)  # There is no backward to do it.
        return found

    def _run(self, run: Any, batches: Sequence[MicroBatch]) -> list[Tensor]:
        inputs: tuple[Tensor, ...] = ()
        more: dict[str, Tensor] = {}
        losses: list[Tensor] = []
        if self._rank.has_first:
            inputs = (torch.cat([tokens for tokens, _ in batches]),)
        if self._rank.has_last:
            labels = torch.cat([labels for _, labels in batches])
            more = {"labels": labels, "target": labels}
            if self._rank.mtp is not None:
                more["tokens"] = torch.cat([tokens for tokens, _ in batches])
        run(*inputs, losses=losses, return_outputs=False, **more)
        return [loss.detach() for loss in losses]


def received(stage: LossStage, shape: Sequence[int]) -> Tensor:
    """Return the tensors that a stage receives for a micro-batch, on the meta device."""
    if stage.is_first:
        return torch.empty(shape, dtype=torch.int64, device="meta")
    return _between(stage, shape)


def _between(stage: LossStage, shape: Sequence[int]) -> Tensor:
    size, positions = shape
    return torch.empty(
        size,
        positions // (stage.sequence_ranks * stage.sequence.ranks),
        stage.config.hidden_size,
        dtype=stage.compute_dtype or torch.float32,
        device="meta",
        requires_grad=True,
    )
