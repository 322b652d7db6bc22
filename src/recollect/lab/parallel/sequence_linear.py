"""A matrix product that each rank of sequence parallelism runs on its part of the sequence, with the whole matrix."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from recollect.lab.models.linear import Linear

__all__ = ["SequenceLinear", "with_partial_gradient"]


def with_partial_gradient(tensor: Tensor, mesh: DeviceMesh, spread: Shard | Replicate | None = None) -> Tensor:
    """Return the whole of a tensor, of whose gradient each rank has a part of the sum; backward adds these up.

    Args:
        tensor: the same on all ranks, or this rank's part of it.
        mesh: one-dimensional.
        spread: which of both; None: the same on all ranks.
    """
    whole = DTensor.from_local(tensor, mesh, [spread or Replicate()], run_check=False)
    own: Tensor = whole.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    return own


class SequenceLinear(Linear):
    """Not a DTensor's product: of a batch of parts of sequences it would make a strided view that nothing can be saved of.

    Args:
        whole: the product; its parameters are taken over.
        mesh: the ranks.
    """

    def __init__(self, whole: Linear, mesh: DeviceMesh) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.init_std = whole.in_features, whole.out_features, whole.init_std
        self.weight, self.bias = whole.weight, whole.bias
        self.mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        """Map this rank's part, a DTensor or not."""
        own = x.to_local() if isinstance(x, DTensor) else x
        weight, bias = (
            None if p is None else with_partial_gradient(p, self.mesh).to(own.dtype) for p in (self.weight, self.bias)
        )
        assert weight is not None
        return F.linear(own, weight, bias)
