"""Modules that a tensor-parallel rank runs in place of the model's: its part of a sequence, of experts, or of the loss.

Each rank has some channels of every expert, or whole ones for its part of a sequence.
With some channels of every expert, and of the shared one, all ranks route all tokens alike. Results of their parts
of the experts are parts of a sum; so are the gradients of the tokens and of their weights.
Where ranks share the experts, too, each sends all of these rows to the ranks with the same channels.

A fused projection has rows for queries, keys and values, or for gate and up. Cut into equal parts in that order, they
would give the first rank only queries. Reordered, part r has the r-th part of each.

Shape legend: B batch   T positions   L positions of this rank   D hidden_size
    N tokens   V vocabulary of this rank   R ranks
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, get_rank, get_world_size
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from recollect._torch_parallel import all_gather_rows
from recollect.lab.models.gpt import IGNORE_INDEX
from recollect.lab.models.linear import Linear
from recollect.lab.models.mlp import MoELayer
from recollect.lab.models.router import RouterStatistics
from recollect.lab.parallel.expert import SharedGroups


def interleaved(rows: Tensor, sizes: Sequence[int], ranks: int) -> Tensor:
    """Return the rows with the share of rank 0 first, then that of rank 1, and so on.

    `sizes`: rows of each of the matrices, which are fused one after the other; multiples of `ranks`.

    Example:
        >>> interleaved(torch.tensor([0, 1, 2, 3, 10, 11]), (4, 2), 2).tolist()
        [0, 1, 10, 2, 3, 11]
    """
    parts = [matrix.chunk(ranks) for matrix in rows.split(list(sizes))]
    return torch.cat([part[rank] for rank in range(ranks) for part in parts])


def whole_rows(rows: range, sizes: Sequence[int], ranks: int) -> list[range]:
    """Return the places in the whole matrix of some rows of the result of `interleaved`, in the same order.

    Example:
        >>> whole_rows(range(1, 4), (4, 2), 2)  # of [0, 1, 10, 2, 3, 11]
        [range(1, 2), range(4, 5), range(2, 3)]
    """
    found, begin = [], 0
    starts = [sum(sizes[:matrix]) for matrix in range(len(sizes))]
    for rank in range(ranks):
        for start, size in zip(starts, sizes, strict=True):
            share = size // ranks
            first, last = max(rows.start, begin), min(rows.stop, begin + share)
            if first < last:
                moved = start + rank * share - begin
                found.append(range(first + moved, last + moved))
            begin += share
    return found


def with_partial_gradient(tensor: Tensor, mesh: DeviceMesh, spread: Shard | Replicate | None = None) -> Tensor:
    """Return the whole of a tensor; each rank has a part of the sum that is its gradient, and backward adds these up."""
    whole = DTensor.from_local(tensor, mesh, [spread or Replicate()], run_check=False)
    return whole.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


class SequenceLinear(Linear):
    """Not a DTensor's product: for a batch of parts of sequences it would make a strided view that cannot be saved."""

    def __init__(self, whole: Linear, mesh: DeviceMesh) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.init_std = whole.in_features, whole.out_features, whole.init_std
        self.weight, self.bias, self.fp8 = whole.weight, whole.bias, whole.fp8
        self.mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        """Map this rank's part, a DTensor or not."""
        own = x.to_local() if isinstance(x, DTensor) else x
        weight, bias = (None if p is None else with_partial_gradient(p, self.mesh) for p in (self.weight, self.bias))
        assert weight is not None
        return self.multiply(own, weight, bias)


class SplitProduct(nn.Module):
    """A product in 8 bits of matrices that ranks share; each casts its part, with its own scales."""

    def __init__(self, product: nn.Module) -> None:
        super().__init__()
        self.product = product

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Map [N, I] to [N, O]: DTensors; weights are split along either dimension."""
        assert isinstance(x, DTensor) and isinstance(weight, DTensor)
        is_of_rows = weight.placements[0].is_shard(0)
        own = x.to_local(grad_placements=[Partial()]) if is_of_rows else x.to_local()
        spread = Shard(1) if is_of_rows else Partial()
        out = self.product(own, weight.to_local())
        return DTensor.from_local(out, weight.device_mesh, [spread], run_check=False)


class SplitMoELayer(MoELayer):
    """A mixture of experts with this rank's channels of each expert.

    `whole` is changed in place. Its shared expert is to be split like any MLP. `between` is the placement of the residual
    stream: whole on all ranks, or cut along the sequence.
    """

    def __init__(self, whole: MoELayer, mesh: DeviceMesh, between: Shard | Replicate) -> None:
        nn.Module.__init__(self)
        self.router, self.experts, self.shared_experts = whole.router, whole.experts, whole.shared_experts
        self.mesh, self.between = mesh, between
        experts = self.experts  # the channels inside of each are cut into parts
        if experts.activation_func.is_gated:
            weight_EOI = experts.linear_fc1.weight
            width = weight_EOI.shape[1] // 2
            with torch.no_grad():
                weight_EOI.copy_(interleaved(weight_EOI.transpose(0, 1), (width, width), mesh.size()).transpose(0, 1))
        experts.linear_fc1 = SharedGroups(experts.linear_fc1, mesh, 1)
        experts.linear_fc2 = SharedGroups(experts.linear_fc2, mesh, 2)
        self.train(whole.training)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, RouterStatistics]:
        """Map the residual stream, under sequence parallelism a DTensor, cut along T; return the router's statistics, too."""
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


class OwnPartMoELayer(MoELayer):
    """A mixture of experts for this rank's part of each sequence, which it routes, and sends to whole experts.

    As in Megatron with `--expert-tensor-parallel-size 1`: nothing is gathered for experts, and each row is exchanged once.
    `whole` is changed in place. `expert_parallel` shares its experts over these ranks and others; the shared expert is to be
    split like any MLP.
    """

    def __init__(self, whole: MoELayer, mesh: DeviceMesh) -> None:
        nn.Module.__init__(self)
        self.router, self.experts, self.shared_experts = whole.router, whole.experts, whole.shared_experts
        # Each rank computes its tokens' share of the gradient.
        self.router.weight_of_all = partial(with_partial_gradient, mesh=mesh)
        self.mesh = mesh
        self.train(whole.training)

    def forward(self, x_BLD: Tensor) -> tuple[Tensor, RouterStatistics]:
        """Map this rank's part of the residual stream, a DTensor; return the router's statistics, too."""
        assert isinstance(x_BLD, DTensor)
        own_BLD = x_BLD.to_local()
        routing = self.router(own_BLD)
        out_BLD = self._routed(own_BLD.flatten(0, 1), routing).view_as(own_BLD)
        if self.shared_experts is not None:
            out_BLD = out_BLD + self.shared_experts(x_BLD)
        statistics: RouterStatistics = routing.statistics
        if statistics.aux_loss is not None:
            # The mean of the ranks' losses, each with its own gradient.
            part = DTensor.from_local(statistics.aux_loss / self.mesh.size(), self.mesh, [Partial()], run_check=False)
            statistics = statistics._replace(aux_loss=part.redistribute(placements=[Replicate()]).to_local())
        return out_BLD, statistics


def vocabulary_parallel_loss(logits_BTV: Tensor, labels_BT: Tensor, *, group: ProcessGroup) -> Tensor:
    """Return the mean cross entropy over the labels that are not ignored, from this rank's logits: an fp32 scalar.

    Each rank knows, for its part of the vocabulary, the largest logit of a token, the sum of exponentials, and the label's
    logit if the label is there. One all-gather of these three numbers a token gives every rank everything that the loss
    needs; they are put together in the order of the ranks: all ranks have the same bits. The gradient of a
    rank's logits is its own part of softmax minus one-hot, without communication.

    Labels are ids of the whole vocabulary, int64, the same on all ranks, among which it is split in equal parts, in order.
    """
    logits_NV, labels_N = logits_BTV.flatten(0, -2), labels_BT.flatten()
    own_N = labels_N - get_rank(group) * logits_NV.shape[1]
    return _CrossEntropy.apply(logits_NV, own_N, labels_N != IGNORE_INDEX, group)  # type: ignore[no-untyped-call]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, counts_N: Tensor, group: ProcessGroup) -> Tensor:
        """`labels_N`: counted from the first token of this rank's part, beyond it for other ranks' tokens."""
        wide_NV = logits_NV.float()
        greatest_N = wide_NV.amax(dim=1)
        sums_N = (wide_NV - greatest_N.unsqueeze(1)).exp_().sum(dim=1)
        is_here_N = (labels_N >= 0) & (labels_N < wide_NV.shape[1])
        own_N = torch.where(is_here_N, labels_N, 0)
        label_N = torch.where(is_here_N, wide_NV.gather(1, own_N.unsqueeze(1)).squeeze(1), 0.0)
        del wide_NV
        facts_N3 = torch.stack((greatest_N, sums_N, label_N), dim=1)
        facts_RN3 = facts_N3.new_empty(get_world_size(group), *facts_N3.shape)
        all_gather_rows(facts_RN3.flatten(0, 1), facts_N3, group)
        greatest_RN, sums_RN, label_RN = facts_RN3.unbind(-1)
        greatest_N = greatest_RN.amax(dim=0)
        sums_N = (sums_RN * (greatest_RN - greatest_N).exp()).sum(dim=0)
        log_sums_N = greatest_N + sums_N.log()
        num_counted = counts_N.sum()
        ctx.save_for_backward(logits_NV, own_N, is_here_N, counts_N, log_sums_N, num_counted)
        return torch.where(counts_N, log_sums_N - label_RN.sum(dim=0), 0.0).sum() / num_counted

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        logits_NV, own_N, is_here_N, counts_N, log_sums_N, num_counted = ctx.saved_tensors
        gradient_NV = (logits_NV.float() - log_sums_N.unsqueeze(1)).exp_()
        gradient_NV.scatter_add_(1, own_N.unsqueeze(1), -is_here_N.to(gradient_NV.dtype).unsqueeze(1))
        weight_N = torch.where(counts_N, grad_outputs[0] / num_counted, 0.0)
        return gradient_NV.mul_(weight_N.unsqueeze(1)).to(logits_NV.dtype), None, None, None
