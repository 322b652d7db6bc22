"""Reorder the rows of fused matrices, so that equal contiguous parts give each rank its share of each of the fused ones.

The rows of a fused projection are those of queries, keys and values, or of gate and up. Cut into equal parts as they are, the
first rank would get nothing but queries. Reordered, part r has the r-th part of each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def interleaved(rows: Tensor, sizes: Sequence[int], ranks: int) -> Tensor:
    """Return the rows with the share of rank 0 first, then that of rank 1, and so on.

    Args:
        rows: [sum of `sizes`, ...], one fused matrix after the other.
        sizes: rows of each; multiples of `ranks`.
        ranks: number of parts.

    Example:
        >>> interleaved(torch.tensor([0, 1, 2, 3, 10, 11]), (4, 2), 2).tolist()
        [0, 1, 10, 2, 3, 11]
    """
    parts = [matrix.chunk(ranks) for matrix in rows.split(list(sizes))]
    return torch.cat([part[rank] for rank in range(ranks) for part in parts])


def whole_rows(rows: range, sizes: Sequence[int], ranks: int) -> list[range]:
    """Return where some rows of what `interleaved` returns are in the whole matrix, in the same order.

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
