"""Copies the containers and generators among a module's attributes and arguments, which forward may change."""

from __future__ import annotations

import copy
import random
from collections import deque
from typing import Any

import torch

__all__ = ["Copies"]

# A longer container is taken for data that forward reads: a vocabulary, not a history.
_LONGEST_CONTAINER = 1000

_UNCHANGING = frozenset({int, float, bool, str, bytes, type(None)})


class Copies:
    """Copies containers with those inside them, each once; what else is in them stays the same.

    Attributes:
        tensors: those that were met on the way.

    Example:
        >>> history, shared = [1, [2]], {"x": [3]}
        >>> one, other = (copies := Copies()).of((history, shared)), copies.of(shared)
        >>> history[1].append(4)
        >>> one, other is one[1]
        (([1, [2]], {'x': [3]}), True)
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        # With the originals, whose numbers may not be given to others meanwhile.
        self._made: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any) -> Any:
        """Return a copy of a container, or of a generator of random numbers; anything else as it is."""
        if type(value) in _UNCHANGING:
            return value
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
        elif isinstance(value, tuple):
            items = [self.of(item) for item in value]
            if any(item is not other for item, other in zip(items, value, strict=True)):
                return getattr(value, "_make", tuple)(items)
        elif isinstance(value, (list, dict, set, deque)) and len(value) <= _LONGEST_CONTAINER:
            if id(value) not in self._made:
                self._made[id(value)] = value, copy.copy(value)
                self._fill(self._made[id(value)][1])
            return self._made[id(value)][1]
        elif isinstance(value, random.Random) or type(value).__module__.startswith("numpy.random"):
            return self._made.setdefault(id(value), (value, copy.deepcopy(value)))[1]
        return value

    def _fill(self, copied: Any) -> None:
        if isinstance(copied, set):
            return
        for key, item in list(copied.items() if isinstance(copied, dict) else enumerate(copied)):
            if (other := self.of(item)) is not item:
                copied[key] = other
