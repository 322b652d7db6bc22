"""A rank's part of a sequence: all of it, unless `recollect.lab.parallel.context` splits it over ranks.

Shape legend: B batch   T positions of the whole sequence   E experts
"""

from torch import Tensor


class WholeSequence:
    """All positions, in order; `ranks` says among how many ranks sequences are split."""

    ranks = 1

    def own(self, x_T: Tensor) -> Tensor:
        return x_T

    def loss(self, mean: Tensor, labels_BT: Tensor) -> Tensor:
        """Return this rank's loss from the mean over its own labels; the ranks' mean is the whole loss."""
        return mean

    def shared(self, loss: Tensor) -> Tensor:
        """Return the mean of the ranks' losses; backward starts from this rank's loss."""
        return loss

    def counts(self, counts_BE: Tensor) -> Tensor:
        return counts_BE
