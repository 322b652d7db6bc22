"""Context parallelism: the ranks of a mesh split each sequence, and attention gathers the keys and values of all.

With causal attention a later position has more keys to look at. So the sequence is cut into two chunks a rank, and rank r has
chunk r from the front and chunk r from the back, as in Megatron: then all ranks have the same work. A chunk's queries need the
keys up to its own end, a prefix of the sequence.

Shape legend: B batch   T positions of the whole sequence   L positions of a chunk   R ranks
    K key and value heads   C channels of one
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, get_world_size
from torch.distributed.device_mesh import DeviceMesh

from recollect._torch_parallel import gathered_with_gradient, summed
from recollect.lab.models.attention import LatentAttention, RotaryEmbedding, SelfAttention
from recollect.lab.models.gpt import IGNORE_INDEX, GPTModel, LanguageModelEmbedding
from recollect.lab.models.sequence import WholeSequence
from recollect.lab.parallel.expert import balance_over
from recollect.lab.parallel.layout import DeviceLayout


def context_parallel(model: GPTModel, mesh: DeviceMesh) -> GPTModel:
    """Split each sequence over the ranks of a mesh.

    The model has the same weights on all ranks, or is on the meta device, and is changed in place. All ranks pass the same
    batch, of whole sequences. Its output has the logits of this rank's positions, and the whole loss. Gradients are for this
    rank's positions, times the ranks: their mean over the mesh is the gradient. `data_parallel` over the mesh takes it.

    Limitations: ranks draw random numbers from their own generators. On a CPU, attention needs a mask of chunk by keys.
    """
    part = SequencePart(mesh.get_group())
    for module in [*model.modules()]:
        if isinstance(module, GPTModel | LanguageModelEmbedding | RotaryEmbedding):
            module.sequence = part
        elif isinstance(module, SelfAttention | LatentAttention):
            module.core_attention = GatheredAttention(module.core_attention, mesh.get_group())
    route_parts(model, mesh)
    balance_over(model, mesh)
    return model


def route_parts(model: GPTModel, mesh: DeviceMesh) -> None:
    """Let routers count the tokens of whole sequences, though each rank routes only a part."""
    part = SequencePart(mesh.get_group())
    for router in model.routers:
        router.sequence = part


class SequencePart(WholeSequence):
    """The two chunks that this rank has of each sequence."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.rank, self.ranks = torch.distributed.get_rank(group), get_world_size(group)

    def own(self, x_T: Tensor) -> Tensor:
        DeviceLayout(context_parallel_size=self.ranks).check_sequence(x_T.shape[-1])
        chunks = x_T.chunk(2 * self.ranks, dim=-1)
        return torch.cat((chunks[self.rank], chunks[-1 - self.rank]), dim=-1)

    def loss(self, mean: Tensor, labels_BT: Tensor) -> Tensor:
        """Weight the mean over this rank's labels by their share of all labels."""
        counted_BT = labels_BT != IGNORE_INDEX
        num_own = self.own(counted_BT).sum()
        # The mean over no labels is nan.
        return torch.where(num_own > 0, mean, torch.zeros_like(mean)) * (self.ranks * num_own / counted_BT.sum())

    def shared(self, loss: Tensor) -> Tensor:
        """Return the mean of the ranks' losses, the same bits on every rank; backward starts from this rank's loss."""
        return _Mean.apply(loss, self.group)  # type: ignore[no-untyped-call]

    def counts(self, counts_BE: Tensor) -> Tensor:
        return summed(counts_BE, self.group)


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, group: ProcessGroup) -> Tensor:
        return summed(loss, group) / get_world_size(group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        return grad_outputs[0], None


class GatheredAttention(nn.Module):
    """Core attention of this rank's queries over the keys and values of all ranks."""

    def __init__(self, attend: nn.Module, group: ProcessGroup) -> None:
        super().__init__()
        self.attend = attend
        self.group = group
        self.rank, self.ranks = torch.distributed.get_rank(group), get_world_size(group)

    def forward(self, q_BTHC: Tensor, k_BTKC: Tensor, v_BTKE: Tensor) -> Tensor:
        """Mix the values of all earlier positions, into [B, T, H * E], for this rank's T."""
        keys, values = self._gathered(k_BTKC), self._gathered(v_BTKE)
        early_BLHC, late_BLHC = q_BTHC.chunk(2, dim=1)
        end = (self.rank + 1) * early_BLHC.shape[1]
        mixed = (
            self.attend(early_BLHC, keys[:, :end], values[:, :end], are_last=True),
            self.attend(late_BLHC, keys, values, are_last=True),
        )
        return torch.cat(mixed, dim=1)

    def _gathered(self, x_BTKC: Tensor) -> Tensor:
        """Return the keys or values up to the end of this rank's later chunk."""
        own_2BLKC = torch.stack(x_BTKC.chunk(2, dim=1))
        all_RBLKC = gathered_with_gradient(own_2BLKC, self.group)
        # From the front each rank has one, then from the back.
        order = [2 * rank for rank in range(self.ranks)] + [2 * rank + 1 for rank in reversed(range(self.ranks))]
        chunks = all_RBLKC.unbind()
        return torch.cat([chunks[place] for place in order[: 2 * self.ranks - self.rank]], dim=1)
