"""What the processes of a pipeline exchange in a step: all that others do, what goes between stages, and a shared embedding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recollect.lab.parallel.mesh import LayoutMesh
from recollect.lab.parallel.pipeline_step import PipelineStep
from recollect.lab.parallel.stages import PipelineRank
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
        self._add_shared_gradients()
        return self._summed(losses) / accumulation

    def losses(self, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """See `Exchange`; losses are zero where the last stage is not."""
        own = list(batches)
        return self.step.losses(own) or [torch.zeros((), device=own[0][0].device) for _ in own]

    def _norm(self, parameters: Sequence[nn.Parameter]) -> float:
        copies = set() if self.rank.has_first else {id(parameter) for parameter in self.rank.shared}
        own = super()._norm([parameter for parameter in parameters if id(parameter) not in copies])
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

    def _add_shared_gradients(self) -> None:
        """Give both copies of an embedding the gradient of all of its uses."""
        shared = self.rank.shared
        if not shared:
            return
        group, ranks = self._pipeline.get_group(), self._pipeline.size()
        peer = dist.get_global_rank(group, ranks - 1 if self.rank.has_first else 0)
        own = [_own_rows(parameter) for parameter in shared]
        others = [torch.empty_like(gradient) for gradient in own]
        sent = [dist.P2POp(dist.isend, gradient, peer, group) for gradient in own]
        received = [dist.P2POp(dist.irecv, gradient, peer, group) for gradient in others]
        for work in dist.batch_isend_irecv([*sent, *received]):
            work.wait()
        for gradient, other in zip(own, others, strict=True):
            gradient.add_(other)


def _own_rows(parameter: nn.Parameter) -> Tensor:
    """Return the gradient of what is here of a parameter."""
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(parameter, DTensor):
        # An embedding's gradient has all rows, until something asks for those of this rank.
        assert isinstance(gradient, DTensor)
        gradient = gradient.redistribute(placements=parameter.placements)
        parameter.grad = gradient
    return local_part(gradient)
