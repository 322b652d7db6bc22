"""Expert parallelism: the ranks of a mesh, each with its own batch, share the experts of a layer, and exchange rows.

Each rank sends every row to the rank that has its expert, and gets the result back (Lepikhin et al. 2020, arXiv 2006.16668).
The numbers of rows depend on the batch: ranks exchange them first.

Shape legend: E experts   R ranks   X = E / R experts of a rank   D hidden_size
    S rows of this rank's tokens, one for each token and chosen expert   P rows for this rank's experts, from all ranks
"""

import functools

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from recollect._torch_parallel import exchanged_rows, joined_mesh, summed
from recollect._torch_private import is_fake_tensor
from recollect.errors import ConfigError
from recollect.lab.models.gpt import GPTModel
from recollect.lab.models.mlp import Experts, GroupedLinear, MoELayer
from recollect.lab.parallel.layout import DeviceLayout


def expert_parallel(model: GPTModel, mesh: DeviceMesh, *, balanced: bool = False) -> GPTModel:
    """Give each rank of a mesh some experts of each layer.

    The model has the same weights on all ranks, or is on the meta device; or it is from `tensor_parallel`: each rank then has
    some channels of some experts. It is changed in place. Each rank passes its own batch. The mesh has some ranks of data and
    context parallelism; with tensor parallelism it is a different dimension of its mesh. `balanced` assumes that each rank
    sends equally many rows to each other; for fake tensors, whose routes are unknown.

    Experts are DTensors, shared along their first dimension. Their gradients are sums over the ranks; other gradients cover
    this rank's batch. `data_parallel` averages both.

    Limitations: an auxiliary loss over the batch is one over each rank's. Ranks wait for the one with the most rows.
    With tensor parallelism, all rows are exchanged once for each of its ranks.
    """
    DeviceLayout(expert_model_parallel_size=mesh.size(), data_parallel_size=mesh.size()).check_model(model.config)
    for module in [*model.modules()]:
        if isinstance(module, MoELayer):
            module.experts = ExchangedExperts(module.experts, mesh, balanced=balanced)
    balance_over(model, mesh)
    return model


def balance_over(model: GPTModel, mesh: DeviceMesh) -> None:
    """Let `update_expert_bias` count the tokens of all ranks of a mesh, which have their own batches or parts of sequences.

    All of them have to call it together from then on.
    """
    for router in model.routers:
        router.counts_of_all = functools.partial(summed, group=mesh.get_group())


class ExchangedExperts(Experts):
    """The experts of this rank, for the rows of all ranks."""

    def __init__(self, experts: Experts, mesh: DeviceMesh, *, balanced: bool) -> None:
        nn.Module.__init__(self)
        self.linear_fc1 = SharedGroups(experts.linear_fc1, mesh, 0)
        self.activation_func = experts.activation_func
        self.linear_fc2 = SharedGroups(experts.linear_fc2, mesh, 0)
        self.group, self.ranks, self.rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()
        self.balanced = balanced
        self.train(experts.training)

    def forward(self, x_SD: Tensor, probabilities_S: Tensor, expert_S: Tensor, ends_E: Tensor) -> Tensor:
        """Return the result of `Experts.forward`, with each row's expert on any rank."""
        counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
        equal = [len(ends_E) // self.ranks] * self.ranks
        counts_RX = exchanged_rows(counts_E, equal, equal, self.group).unflatten(0, (self.ranks, -1))
        sent, received = self._splits(x_SD, counts_E.unflatten(0, (self.ranks, -1)), counts_RX)
        x_PD = exchanged_rows(x_SD, received, sent, self.group)
        probabilities_P = exchanged_rows(probabilities_S, received, sent, self.group)
        out_PD = self._own(x_PD, probabilities_P, counts_RX, sum(received))
        return exchanged_rows(out_PD, sent, received, self.group)

    def _own(self, x_PD: Tensor, probabilities_P: Tensor, counts_RX: Tensor, num_rows: int) -> Tensor:
        """Run this rank's experts; rows are ordered by rank, then by expert."""
        ranks, experts = counts_RX.shape
        number_RX = torch.arange(experts, device=x_PD.device).expand(ranks, -1)
        expert_P = number_RX.flatten().repeat_interleave(counts_RX.flatten(), output_size=num_rows)
        ends_X = counts_RX.sum(dim=0).cumsum(0, dtype=torch.int32)
        if not num_rows:
            # Grouped products need a row; one of zeros adds nothing to the gradients, which all ranks have to have.
            x_PD, probabilities_P, expert_P = (
                nn.functional.pad(t, (*[0] * (2 * t.dim() - 1), 1)) for t in (x_PD, probabilities_P, expert_P)
            )
            ends_X = ends_X + 1
        expert_P, order_P = expert_P.sort(stable=True)
        out_PD = super().forward(x_PD[order_P], probabilities_P[order_P], expert_P, ends_X)
        return out_PD[order_P.argsort()][:num_rows]

    def _splits(self, x_SD: Tensor, sent_RX: Tensor, received_RX: Tensor) -> tuple[list[int], list[int]]:
        if not self.balanced:
            both_2R = torch.stack((sent_RX.sum(dim=1), received_RX.sum(dim=1)))
            sent, received = both_2R.tolist()
            return sent, received
        if not is_fake_tensor(x_SD):
            raise ConfigError(
                settings={"balanced": True},
                reason="these are real tensors, whose routes tell where rows go",
                advice="Leave it out, or record on fake tensors.",
            )
        each, more = divmod(len(x_SD), self.ranks)
        return [each + (rank < more) for rank in range(self.ranks)], [each + (self.rank < more)] * self.ranks


class SharedGroups(GroupedLinear):
    """Multiplies by this rank's part of what has the same weights on all ranks, or is on the meta device, or a part already.

    `dim`: of the weights [groups, output channels, input channels], and of the biases, the one that is cut into parts.
    """

    def __init__(self, whole: GroupedLinear, mesh: DeviceMesh, dim: int) -> None:
        nn.Module.__init__(self)
        self.init_std, self.is_grouped, self.fp8 = whole.init_std, whole.is_grouped, whole.fp8
        self.weight = nn.Parameter(_part(whole.weight, mesh, dim))
        self.bias = None if whole.bias is None else nn.Parameter(_part(whole.bias, mesh, dim))

    def own(self, parameter: Tensor) -> Tensor:
        assert isinstance(parameter, DTensor)
        return parameter.to_local()


def _part(whole: Tensor, mesh: DeviceMesh, dim: int) -> DTensor:
    if not isinstance(whole, DTensor):
        return distribute_tensor(whole, mesh, [Shard(dim)])
    # Cut along a different dimension before, on each rank of `mesh` in the same way.
    own = distribute_tensor(whole.to_local().detach(), mesh, [Shard(dim)]).to_local()
    both = joined_mesh(mesh, whole.device_mesh)
    return DTensor.from_local(own, both, [Shard(dim), *whole.placements], run_check=False)
