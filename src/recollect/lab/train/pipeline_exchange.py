"""What the processes of a pipeline exchange in a step: all that others do, what goes between stages, and a shared embedding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recollect.lab.parallel.mesh import LayoutMesh
from recollect.lab.parallel.pipeline_rank import PipelineRank
from recollect.lab.parallel.pipeline_step import PipelineStep
from recollect.lab.train.exchange import RanksExchange, local_part
from recollect.lab.train.processes import Processes

__all__ = ["PipelineExchange"]


class PipelineExchange(RanksExchange):
    """A step of several processes that share the layers.

    Args:
        processes: all of them.
        mesh: which of them share what.
        rank: the stages of this one.
        step: runs them.

    Attributes:
        rank: the stages of this process.
        step: runs them.
    """

    def __init__(self, processes: Processes, mesh: LayoutMesh, rank: PipelineRank, step: PipelineStep) -> None:
        super().__init__(processes, mesh, rank)
        self.step = step
        self.rank, self._pipeline = rank, mesh.pipeline

    def accumulate(self, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], accumulation: int) -> Tensor:
        """See `Exchange`; the loss is zero where the last stage is not."""
        losses = self.step.gradients(list(batches))
        self._add_shared_gradient()
        return self._summed(losses) / accumulation

    def losses(self, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """See `Exchange`; losses are zero where the last stage is not."""
        own = list(batches)
        return self.step.losses(own) or [torch.zeros((), device=own[0][0].device) for _ in own]

    def _norm(self, parameters: Sequence[nn.Parameter]) -> float:
        copy = None if self.rank.has_first else self.rank.shared_weight
        own = super()._norm([parameter for parameter in parameters if parameter is not copy])
        device = parameters[0].device
        squares = torch.tensor(own, dtype=torch.float64, device=device).square()
        dist.all_reduce(squares, group=self._pipeline.get_group())
        return squares.sqrt().item()

    def _sum(self, value: Tensor) -> float:
        dist.all_reduce(value, group=self._pipeline.get_group())
        return super()._sum(value)

    def _summed(self, losses: Sequence[Tensor]) -> Tensor:
        device = next(self.rank.parameters()).device
        return torch.stack([torch.zeros((), device=device), *losses]).sum()

    def _add_shared_gradient(self) -> None:
        """Give both copies of an embedding that is the LM head, too, the gradient of both uses."""
        weight = self.rank.shared_weight
        if weight is None:
            return
        assert weight.grad is not None
        if isinstance(weight, DTensor):
            # An embedding's gradient has all rows, until something asks for this rank's.
            assert isinstance(weight.grad, DTensor)
            weight.grad = weight.grad.redistribute(placements=weight.placements)
        group, ranks = self._pipeline.get_group(), self._pipeline.size()
        own = local_part(weight.grad)
        other = torch.empty_like(own)
        peer = dist.get_global_rank(group, ranks - 1 if self.rank.has_first else 0)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, own, peer, group), dist.P2POp(dist.irecv, other, peer, group)]
        )
        for work in works:
            work.wait()
        own.add_(other)
