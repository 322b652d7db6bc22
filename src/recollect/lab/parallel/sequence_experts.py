"""Whole experts beside tensor parallelism: each rank routes its part of a sequence, and sends its tokens to experts.

As in Megatron with `--expert-tensor-parallel-size 1`: nothing is gathered for experts, and each row is exchanged once.

Shape legend: B batch   L positions of this rank   D hidden_size
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from recollect.lab.models.moe import MoELayer
from recollect.lab.models.router import RouterStatistics
from recollect.lab.parallel.sequence_linear import with_partial_gradient

__all__ = ["OwnPartMoELayer"]


class OwnPartMoELayer(MoELayer):
    """A mixture of experts for this rank's part of each sequence.

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
