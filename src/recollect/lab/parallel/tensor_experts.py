"""Tensor parallelism of experts: each rank has some channels of every expert, and of the shared one.

All ranks route all tokens alike. What they send through their parts of the experts are parts of a sum; so are the gradients of
the tokens and of their weights. Where ranks share the experts, too, each sends all of these
rows to the ranks with the same channels.

Shape legend: B batch   T positions   D hidden_size
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from recollect.lab.models.experts import Experts
from recollect.lab.models.moe import MoELayer
from recollect.lab.models.router import RouterStatistics
from recollect.lab.parallel.fused_rows import interleaved
from recollect.lab.parallel.sequence_linear import with_partial_gradient
from recollect.lab.parallel.shared_groups import SharedGroups

__all__ = ["SplitMoELayer"]


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
