"""Experts beside tensor parallelism: each rank has some channels of every expert, or whole ones for its part of a sequence.

With some channels of every expert, and of the shared one, all ranks route all tokens alike. What they send through their parts
of the experts are parts of a sum; so are the gradients of the tokens and of their weights.
Where ranks share the experts, too, each sends all of these rows to the ranks with the same channels.

Shape legend: B batch   T positions   L positions of this rank   D hidden_size
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from recollect.lab.models.experts import Experts
from recollect.lab.models.moe import MoELayer
from recollect.lab.models.router import RouterStatistics
from recollect.lab.parallel.expert import SharedGroups
from recollect.lab.parallel.fused_rows import interleaved
from recollect.lab.parallel.sequence_linear import with_partial_gradient

__all__ = ["OwnPartMoELayer", "SplitMoELayer"]


class SplitMoELayer(MoELayer):
    """A mixture of experts, of each of which this rank has some channels.

    Args:
        whole: all of it; changed in place. The shared expert is that of `whole`, to be split like any MLP.
        mesh: the ranks.
        between: how the residual stream is spread: whole on all ranks, or cut along the sequence.
    """

    def __init__(self, whole: MoELayer, mesh: DeviceMesh, between: Shard | Replicate) -> None:
        nn.Module.__init__(self)
        self.router, self.experts, self.shared_experts = whole.router, whole.experts, whole.shared_experts
        self.mesh, self.between = mesh, between
        _split(self.experts, mesh)
        self.train(whole.training)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, RouterStatistics]:
        """Return the output for the residual stream, and the router's statistics.

        Args:
            x_BTD: the normalised residual stream; under sequence parallelism a DTensor, cut along T.
        """
        if isinstance(x_BTD, DTensor):
            x_BTD = x_BTD.redistribute(placements=[Replicate()]).to_local()
        routing = self.router(x_BTD)
        probabilities_NJ = with_partial_gradient(routing.probabilities_NJ, self.mesh)
        rows_ND = with_partial_gradient(x_BTD, self.mesh).flatten(0, 1)
        part_BTD = self._routed(rows_ND, routing._replace(probabilities_NJ=probabilities_NJ)).view_as(x_BTD)
        parts_BTD = DTensor.from_local(part_BTD, self.mesh, [Partial()], run_check=False)
        out_BTD: Tensor = parts_BTD.redistribute(placements=[self.between]).to_local()
        if self.shared_experts is not None:
            out_BTD = out_BTD + self.shared_experts(x_BTD)
        return out_BTD, routing.statistics


def _split(experts: Experts, mesh: DeviceMesh) -> None:
    """Cut the channels inside of each expert into parts."""
    if experts.activation_func.is_gated:
        weight_EOI = experts.linear_fc1.weight
        width = weight_EOI.shape[1] // 2
        with torch.no_grad():
            weight_EOI.copy_(interleaved(weight_EOI.transpose(0, 1), (width, width), mesh.size()).transpose(0, 1))
    experts.linear_fc1 = SharedGroups(experts.linear_fc1, mesh, 1)
    experts.linear_fc2 = SharedGroups(experts.linear_fc2, mesh, 2)


class OwnPartMoELayer(MoELayer):
    """A mixture of experts for this rank's part of each sequence, which it routes, and sends to whole experts.

    As in Megatron with `--expert-tensor-parallel-size 1`: nothing is gathered for experts, and each row is exchanged once.

    Args:
        whole: all of it; changed in place. `expert_parallel` shares its experts over ranks of which these are some; the shared
            expert is to be split like any MLP.
        mesh: the ranks of sequence parallelism.
    """

    def __init__(self, whole: MoELayer, mesh: DeviceMesh) -> None:
        nn.Module.__init__(self)
        self.router, self.experts, self.shared_experts = whole.router, whole.experts, whole.shared_experts
        # Of whose gradient each rank finds what its tokens add.
        self.router.weight_of_all = partial(with_partial_gradient, mesh=mesh)
        self.mesh = mesh
        self.train(whole.training)

    def forward(self, x_BLD: Tensor) -> tuple[Tensor, RouterStatistics]:
        """Return the output for this rank's part of the residual stream, and the router's statistics.

        Args:
            x_BLD: the normalised residual stream, a DTensor that is cut along the sequence.
        """
        assert isinstance(x_BLD, DTensor)
        own_BLD = x_BLD.to_local()
        routing = self.router(own_BLD)
        out_BLD = self._routed(own_BLD.flatten(0, 1), routing).view_as(own_BLD)
        if self.shared_experts is not None:
            out_BLD = out_BLD + self.shared_experts(x_BLD)
        return out_BLD, routing.statistics._replace(aux_loss=self._mean(routing.statistics.aux_loss))

    def _mean(self, loss: Tensor | None) -> Tensor | None:
        """Return the mean of the ranks' losses, each with the gradient of its own."""
        if loss is None:
            return None
        part = DTensor.from_local(loss / self.mesh.size(), self.mesh, [Partial()], run_check=False)
        whole: Tensor = part.redistribute(placements=[Replicate()]).to_local()
        return whole
