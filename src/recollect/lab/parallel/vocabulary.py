"""Cross entropy of logits that are split over ranks along the vocabulary.

Each rank knows, for its part of the vocabulary, the largest logit of a token, the sum of exponentials, and the label's logit if
the label is there. One all-gather of these three numbers a token gives every rank all that the loss needs; they are put
together in the order of the ranks, so that all ranks have the same bits. The gradient of a rank's logits is its own part of
softmax minus one-hot, without communication.

Shape legend: N tokens   V vocabulary of this rank   R ranks
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, get_rank, get_world_size

from recollect._torch_parallel import all_gather_rows

__all__ = ["VocabularyParallelLoss"]


class VocabularyParallelLoss:
    """Mean cross entropy over the labels that are not ignored, from this rank's logits.

    Args:
        group: the ranks among which the vocabulary is split, in equal parts, in order.
        ignore_index: the label of ignored tokens.
    """

    def __init__(self, group: ProcessGroup, ignore_index: int) -> None:
        self.group = group
        self.rank = get_rank(group)
        self.ignore_index = ignore_index

    def __call__(self, logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
        """Return the loss, an fp32 scalar; the same bits on every rank.

        Args:
            logits_BTV: [..., V] of this rank.
            labels_BT: [...] int64, ids of the whole vocabulary, the same on all ranks.
        """
        logits_NV, labels_N = logits_BTV.flatten(0, -2), labels_BT.flatten()
        labels_N = labels_N - self.rank * logits_NV.shape[1]
        loss: Any = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
            logits_NV, labels_N, labels_BT.flatten() != self.ignore_index, self.group
        )
        return cast(Tensor, loss)


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
