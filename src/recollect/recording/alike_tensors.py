"""Follows, on fake tensors, which tensors of a step are the same on all ranks that may hold parts of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import torch

from recollect._torch_parallel import group_ranks
from recollect._torch_private import tree_leaves
from recollect.engine.facts import OpFacts
from recollect.recording.trackers import storage_of

__all__ = ["AlikeTensors"]

_ALIKE: Final = "_recollect_alike"
_GATHERING: Final = ("all_reduce", "all_gather", "broadcast")


class AlikeTensors:
    """Which tensors are the same on all ranks, as far as what they are made of tells.

    An op makes the same of the same, and so do collectives of all the ranks together. Integers are left out, with all that is
    made of them: ranks count from places of their own in what they share, such as a vocabulary, by numbers that ops are given.
    What a plan then holds as parts is compared when it is applied.

    Args:
        ranks: that hold parts.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = frozenset(ranks)

    def begin(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take parameters, buffers and the batch, which ranks share unless they are parts."""
        for tensor in tensors:
            # Not by type: to import DTensor takes a second, and plain models have none.
            placements = getattr(tensor, "placements", ())
            if all(placement.is_replicate() for placement in placements):
                self._mark(tensor.to_local() if placements else tensor, is_alike=True)  # type: ignore[attr-defined]

    def after_op(self, func: Any, facts: OpFacts, args: Any, kwargs: Any, output: Any) -> None:
        """Follow an op."""
        inputs = list(_tensors((args, kwargs)))
        is_alike = bool(inputs) and all(map(self.is_alike, inputs)) and not facts.is_random
        if func.namespace in ("c10d_functional", "_c10d_functional") and "wait" not in func.__name__:
            whole = self._ranks <= set(group_ranks(tree_leaves((args, kwargs))))
            is_alike = any(word in func.__name__ for word in _GATHERING) if whole else is_alike
        for tensor in _tensors(output):
            self._mark(tensor, is_alike=is_alike)

    def is_alike(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the same on all ranks."""
        return getattr(storage_of(tensor), _ALIKE, False)

    def _mark(self, tensor: torch.Tensor, *, is_alike: bool) -> None:
        storage = storage_of(tensor)
        if storage is not None:
            setattr(storage, _ALIKE, is_alike and tensor.dtype.is_floating_point)


def _tensors(found: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor))
