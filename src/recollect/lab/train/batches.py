"""Batches as a function of data, seed and position alone, so that a run can resume anywhere."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from recollect.lab.train.windows import Windows


class BatchSampler:
    """Group windows into batches.

    Args:
        windows: the windows.
        batch_size: windows per batch; a batch may span two epochs.

    Example:
        >>> from recollect.lab.train.windows import TokenWindows
        >>> windows = TokenWindows(np.arange(9, dtype=np.uint16), seq_length=4, seed=None)
        >>> sampler = BatchSampler(windows, batch_size=1)
        >>> sampler.batch(1)
        (tensor([[4, 5, 6, 7]]), tensor([[5, 6, 7, 8]]))
        >>> sampler.batch(3)  # the second epoch
        (tensor([[4, 5, 6, 7]]), tensor([[5, 6, 7, 8]]))
    """

    def __init__(self, windows: Windows, *, batch_size: int) -> None:
        self._windows = windows
        self._batch_size = batch_size

    def batch(self, position: int) -> tuple[Tensor, Tensor]:
        """Return (tokens, labels), each int64 [batch_size, seq_length]; labels are the tokens shifted by one."""
        first = position * self._batch_size
        rows = np.stack([self._windows.window(first + row) for row in range(self._batch_size)]).astype(np.int64)
        both = torch.from_numpy(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()
