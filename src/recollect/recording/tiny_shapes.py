"""Tiny shapes that stand for the shapes of parameters: a number of elements tells which."""

from __future__ import annotations

import math
from itertools import count

import torch


class TinyShapes:
    """Maps parameter shapes to tiny shapes, whose numbers of elements identify them."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self._shapes: dict[tuple[int, ...], list[int]] = {}
        # Products of two primes are not prime, so parameters, their rows, their columns and the squares of these cannot be
        # confused; and none is 1, the size of the scalars that optimizers keep.
        self._primes = (n for n in count(2) if all(n % d for d in range(2, math.isqrt(n) + 1)))

    def tiny(self, shape: torch.Size) -> list[int]:
        """Return the tiny shape that represents a parameter's shape."""
        if shape not in self._shapes:
            numel = shape.numel()
            if len(shape) < 2:
                code = [next(self._primes)]
            else:
                # Of two dimensions the longer one stays the longer: Muon transposes by it.
                smaller, larger = next(self._primes), next(self._primes)
                last = [larger, smaller] if shape[-2] > shape[-1] else [smaller, larger]
                code = [1] * (len(shape) - 2) + last
                # Adafactor keeps a row and a column of a matrix instead of the whole; Muon multiplies it by its transpose.
                for tiny, other in ((code[-2], shape[-1]), (code[-1], shape[-2])):
                    self.sizes[tiny] = numel // max(other, 1)
                    self.sizes[tiny * tiny] = self.sizes[tiny] ** 2
            self.sizes[math.prod(code)] = numel
            self._shapes[shape] = code
        return self._shapes[shape]

    def real_bytes(self, tensor: torch.Tensor) -> int:
        """Return the bytes of the tensor that a tensor of the twin stands for."""
        return self.sizes.get(tensor.numel(), tensor.numel()) * tensor.element_size()
