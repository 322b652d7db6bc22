"""Batches whose content depends on nothing but the tokens, the seed and the position, so a run can resume anywhere."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from recollect.train.tokens import Tokens


class BatchSampler:
    """Windows of `seq_length` tokens, each once an epoch, in an order drawn from (seed, epoch).

    Args:
        tokens: at least `seq_length + 1` ids.
        seq_length: tokens in a window; windows do not overlap, the rest at the end is not used.
        batch_size: windows in a batch; a batch may span two epochs.
        seed: None: windows in their own order, as validation wants.

    Example:
        >>> sampler = BatchSampler(np.arange(9, dtype=np.uint16), seq_length=4, batch_size=1, seed=None)
        >>> sampler.batch(1)
        (tensor([[4, 5, 6, 7]]), tensor([[5, 6, 7, 8]]))
        >>> sampler.batch(3)  # the second epoch
        (tensor([[4, 5, 6, 7]]), tensor([[5, 6, 7, 8]]))
    """

    def __init__(self, tokens: Tokens, *, seq_length: int, batch_size: int, seed: int | None) -> None:
        self._tokens = tokens
        self._seq_length = seq_length
        self._batch_size = batch_size
        self._seed = seed
        self._order: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))
        self.num_windows = (tokens.size - 1) // seq_length

    def batch(self, position: int) -> tuple[Tensor, Tensor]:
        """Return (tokens, labels), each int64 [batch_size, seq_length]; labels are the tokens one further on."""
        first = position * self._batch_size
        starts = [self._window(first + row) * self._seq_length for row in range(self._batch_size)]
        rows = np.stack([self._tokens[start : start + self._seq_length + 1] for start in starts]).astype(np.int64)
        both = torch.from_numpy(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def _window(self, index: int) -> int:
        epoch, place = divmod(index, self.num_windows)
        if self._seed is None:
            return place
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng((self._seed, epoch)).permutation(self.num_windows))
        return int(self._order[1][place])
