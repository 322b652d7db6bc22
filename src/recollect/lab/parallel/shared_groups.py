"""A grouped product of which each rank has a part: some groups, or of each group some channels."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from recollect.lab.models.experts import GroupedLinear

__all__ = ["SharedGroups"]


class SharedGroups(GroupedLinear):
    """Multiplies by this rank's part.

    Args:
        whole: all of it; with the same weights on all ranks, or on the meta device.
        mesh: the ranks that share it.
        dim: of the weights [groups, output channels, input channels], and of the biases, the one that is cut into parts.
    """

    def __init__(self, whole: GroupedLinear, mesh: DeviceMesh, dim: int) -> None:
        nn.Module.__init__(self)
        self.init_std, self.is_grouped = whole.init_std, whole.is_grouped
        self.weight = nn.Parameter(distribute_tensor(whole.weight, mesh, [Shard(dim)]))
        self.bias = None if whole.bias is None else nn.Parameter(distribute_tensor(whole.bias, mesh, [Shard(dim)]))

    def own(self, parameter: Tensor) -> Tensor:
        """Return this rank's part."""
        assert isinstance(parameter, DTensor)
        own: Tensor = parameter.to_local()
        return own
