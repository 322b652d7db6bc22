"""A grouped product of which each rank has a part: some groups, of each group some channels, or both."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from recollect._torch_parallel import joined_mesh
from recollect.lab.models.experts import GroupedLinear

__all__ = ["SharedGroups"]


class SharedGroups(GroupedLinear):
    """Multiplies by this rank's part.

    Args:
        whole: all of it, with the same weights on all ranks, or on the meta device; or what ranks of another mesh share.
        mesh: the ranks that share it.
        dim: of the weights [groups, output channels, input channels], and of the biases, the one that is cut into parts.
    """

    def __init__(self, whole: GroupedLinear, mesh: DeviceMesh, dim: int) -> None:
        nn.Module.__init__(self)
        self.init_std, self.is_grouped = whole.init_std, whole.is_grouped
        self.weight = nn.Parameter(_part(whole.weight, mesh, dim))
        self.bias = None if whole.bias is None else nn.Parameter(_part(whole.bias, mesh, dim))

    def own(self, parameter: Tensor) -> Tensor:
        """Return this rank's part."""
        assert isinstance(parameter, DTensor)
        own: Tensor = parameter.to_local()
        return own


def _part(whole: Tensor, mesh: DeviceMesh, dim: int) -> DTensor:
    if not isinstance(whole, DTensor):
        return distribute_tensor(whole, mesh, [Shard(dim)])
    # Cut along another dimension before, on each rank of `mesh` in the same way.
    own = distribute_tensor(whole.to_local().detach(), mesh, [Shard(dim)]).to_local()
    both = joined_mesh(mesh, whole.device_mesh)
    return DTensor.from_local(own, both, [Shard(dim), *whole.placements], run_check=False)
