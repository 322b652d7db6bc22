"""Tells whether a buffer has been filled slice by slice, as when a model assembles its keys in a `torch.empty`."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["Box", "box_of", "is_covered"]

Box = tuple[tuple[int, int], ...]
"""Where a part of a buffer begins and ends in each dimension."""


def box_of(
    base_size: Sequence[int], base_stride: Sequence[int], size: Sequence[int], stride: Sequence[int], offset: int
) -> Box | None:
    """Return where a slice of a dense buffer lies, or None for a view that is not a slice along its dimensions.

    Example:
        >>> box_of((2, 6), (6, 1), (2, 4), (6, 1), 2)
        ((0, 2), (2, 6))
    """
    if len(size) != len(base_size):
        return None
    begins = [0] * len(size)
    for dim in sorted(range(len(size)), key=lambda d: -base_stride[d]):
        if base_size[dim] == 1:
            continue  # The stride of a dimension of size 1 means nothing.
        if stride[dim] != base_stride[dim] or not base_stride[dim]:
            return None
        begins[dim], offset = divmod(offset, base_stride[dim])
    box = tuple((begin, begin + length) for begin, length in zip(begins, size, strict=True))
    fits = offset == 0 and all(end <= whole for (_, end), whole in zip(box, base_size, strict=True))
    return box if fits else None


def is_covered(base_size: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether non-overlapping parts make up the whole buffer; of two overlapping parts, the second is ignored.

    Example:
        >>> is_covered((2, 6), [((0, 2), (2, 6)), ((0, 2), (0, 2))])
        True
    """
    counted: list[Box] = []
    for box in boxes:
        if all(_are_apart(box, other) for other in counted):
            counted.append(box)
    return sum(math.prod(end - begin for begin, end in box) for box in counted) == math.prod(base_size)


def _are_apart(one: Box, other: Box) -> bool:
    return any(a[1] <= b[0] or b[1] <= a[0] for a, b in zip(one, other, strict=True))
