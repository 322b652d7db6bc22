"""An LM head split over ranks along the vocabulary: the facts a rank needs about the others' logits.

Each rank computes the logits of its part of the vocabulary. For a chunk of tokens the ranks gather three numbers a token: the
largest logit, the sum of exponentials, the label's logit; a fourth with label smoothing, the sum of logits. They are put
together in the order of the ranks: all have the same bits.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from recollect._torch_parallel import all_gather_rows
from recollect._torch_private import is_traceable_wrapper_subclass
from recollect.errors import ChunkedLossError


@dataclass(frozen=True)
class WholeVocabulary:
    """Sums over the whole vocabulary, for some tokens; logits are counted from the largest of each token."""

    total: Tensor
    """[tokens, 1], sums of exponentials."""
    at_target: Tensor
    """[tokens, 1], the labels' logits."""
    mean_logit: Tensor | float = 0.0
    factor: Tensor | None = None
    """[tokens, 1], by which to multiply this rank's exponentials, which it counted from its own largest logit; None if that
    is the largest of all."""


@dataclass(frozen=True)
class VocabularyPart:
    """A rank's part of the vocabulary."""

    group: dist.ProcessGroup
    """The ranks, in the order of their parts."""
    first: int | Tensor
    """Number of this rank's first word."""
    num_words: int | Tensor
    """Of all ranks."""
    sums_hidden: bool
    """Whether the gradient of the hidden states is yet to be summed over the ranks."""

    def together(self, greatest: Tensor, total: Tensor, at_target: Tensor, sums: Tensor | None) -> WholeVocabulary:
        """Gather the facts of all ranks, each [tokens, 1]: the largest logits of this rank, and sums of logits if needed.

        `total` are sums of its exponentials, counted from the largest, and `at_target` the labels' logits, likewise; -inf for
        labels of other ranks.
        """
        own = torch.cat([greatest, total, at_target, *(() if sums is None else (sums,))], dim=1)
        everywhere = own.new_empty(dist.get_world_size(self.group), *own.shape)
        all_gather_rows(everywhere.flatten(0, 1), own, self.group)
        greatest_of, total_of, at_target_of, *sums_of = everywhere.split(1, dim=2)
        most = greatest_of.amax(0)
        below = greatest_of - most
        return WholeVocabulary(
            total=(total_of * below.exp()).sum(0),
            at_target=(at_target_of + below).amax(0),
            mean_logit=sums_of[0].sum(0) / self.num_words - most if sums_of else 0.0,
            factor=(greatest - most).exp_(),
        )


def split_head(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor | None, VocabularyPart]:
    """Return hidden states, weight and bias as plain tensors, as a rank computes with them, and which part it has.

    Hidden states are the same on all ranks, or a DTensor, which may be split along the sequence; weight and bias are this
    rank's part, or DTensors of all parts.
    """
    ranks = dist.get_world_size(group)
    rank = dist.get_rank(group)
    words = weight.shape[0]
    size = -(-words // ranks)
    if size * (ranks - 1) >= words and (is_traceable_wrapper_subclass(weight) or not words):
        raise ChunkedLossError(
            f"chunked_cross_entropy: got a weight of {words} words for {ranks} ranks, expected some for each rank. Use "
            "loss_chunks=1."
        )
    first: int | Tensor = rank * size
    num_words: int | Tensor = words
    if not is_traceable_wrapper_subclass(weight):  # Parts may differ in size; on the device, for which nothing waits.
        sizes = torch.empty(ranks, dtype=torch.int64, device=weight.device)
        all_gather_rows(sizes, torch.full_like(sizes[:1], words), group)
        first, num_words = sizes[:rank].sum(), sizes.sum().double()
    is_split = is_traceable_wrapper_subclass(hidden)
    part = VocabularyPart(group, first, num_words, sums_hidden=not is_split)
    if is_split:
        hidden = _gathered(hidden, group)
    return hidden, _local("weight", weight, group), None if bias is None else _local("bias", bias, group), part


def _gathered(hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return all hidden states; their gradients are summed over the ranks, or each rank gets its part of the sum."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    if not isinstance(hidden, DTensor) or not _is_over(hidden, group):
        raise _other_split("hidden", hidden)
    if hidden.placements[0].is_shard(hidden.dim() - 1):
        raise _other_split("hidden", hidden)
    return hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def _local(name: str, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    if not is_traceable_wrapper_subclass(tensor):
        return tensor
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor) or not _is_over(tensor, group) or not tensor.placements[0].is_shard(0):
        raise _other_split(name, tensor)
    return tensor.to_local()


def _is_over(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    ranks = dist.get_process_group_ranks
    return mesh.ndim == 1 and ranks(mesh.get_group()) == ranks(group)


def _other_split(name: str, tensor: Tensor) -> ChunkedLossError:
    placements = getattr(tensor, "placements", "")
    return ChunkedLossError(
        f"chunked_cross_entropy: {name} is a {type(tensor).__name__} of shape {list(tensor.shape)} {placements}, expected "
        "hidden states that are whole or split along the sequence, and weight and bias split along the vocabulary, over the "
        "ranks of group= only. A head that FSDP2 shards on its own is gathered only in its own forward: shard it together "
        "with the root module."
    )
