"""The weights that a seed gives a model, drawn block by block: a process with a part of a model draws only that.

Constructors draw all weights in sequence from one generator: to get the last, a process has to draw them all. Here each
block of rows has its own generator, so any part has the same bits wherever, and in whatever order, it is drawn.
"""

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recollect.lab.models.gpt import GPTModel
from recollect.lab.models.linear import LayerNorm, RMSNorm

BLOCK_ELEMENTS = 1 << 20
"""Weights drawn at a time, in whole rows: few enough to waste little, and enough to keep a GPU busy."""
# PyTorch's generator of a CPU takes 32 bits: hashes of names would collide in a large model, numbers of blocks do not.
_SEEDS = 1 << 32


@dataclass(frozen=True)
class _Law:
    """How a parameter is drawn."""

    shape: torch.Size
    """Of the whole."""
    mean: float
    std: float
    """Standard deviation of new weights; 0: all are the mean."""
    first: int
    """Number of the first block."""

    @property
    def rows(self) -> int:
        """Rows of a block, unless it is the last one: of a matrix, or of one of a stack of them."""
        return min(self.shape[-2], max(1, BLOCK_ELEMENTS // self.shape[-1]))

    @property
    def blocks(self) -> int:
        return math.ceil(self.shape[-2] / self.rows)


class SeedWeights:
    """The weights of a new model, from the distributions that its constructors draw from.

    Limitations: a CPU and a GPU draw different numbers from one seed, and so may two kinds of GPU.
    """

    def __init__(self, model: GPTModel, seed: int, device: torch.device) -> None:
        self.device = device
        digest = hashlib.blake2b(str(seed).encode(), digest_size=4).digest()
        self._seed = int.from_bytes(digest, "little")
        self._laws: dict[str, _Law] = {}
        first = 0
        known: dict[int, _Law] = {}
        for path, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in known:
                    law = _Law(parameter.shape, *_mean_and_std(module, name), first)
                    known[id(parameter)] = law
                    first += math.prod(law.shape[:-2]) * law.blocks if law.std else 0
                # A tied matrix has the weights of its first occurrence.
                self._laws[f"{path}.{name}"] = known[id(parameter)]
        sizes = [law.rows * law.shape[-1] for law in known.values() if law.std]
        # One for all, since blocks that are freed would leave holes between the weights.
        self._block = torch.empty(max(sizes, default=0), device=device)
        self._generator = torch.Generator(device)

    def write(self, name: str, part: Tensor, offsets: Sequence[int]) -> None:
        law = self._laws[name]
        if not law.std:
            part.fill_(law.mean)
            return
        stack, sizes = law.shape[:-2], part.shape[:-2]
        for place in itertools.product(*map(range, sizes)):
            matrix = 0  # number of the matrix in the stack
            for index, offset, size in zip(place, offsets, stack, strict=False):
                matrix = matrix * size + offset + index
            self._write_rows(law, law.first + matrix * law.blocks, part[place], offsets[-2:])

    def _write_rows(self, law: _Law, first: int, part: Tensor, offsets: Sequence[int]) -> None:
        """Write a part of a matrix whose blocks have the numbers from `first`."""
        (row, column), (height, width) = offsets, part.shape
        if not part.numel():
            return
        for block in range(row // law.rows, math.ceil((row + height) / law.rows)):
            begin = block * law.rows
            end = min(begin + law.rows, law.shape[-2])
            self._generator.manual_seed((self._seed + first + block) % _SEEDS)
            drawn = self._block[: (end - begin) * law.shape[-1]].view(end - begin, -1)
            drawn.normal_(law.mean, law.std, generator=self._generator)
            low, high = max(begin, row), min(end, row + height)
            part[low - row : high - row].copy_(drawn[low - begin : high - begin, column : column + width])


def _mean_and_std(module: nn.Module, name: str) -> tuple[float, float]:
    """Return the distribution of a module's new parameter, as its class initialises it."""
    if name == "weight":
        return (1.0, 0.0) if isinstance(module, LayerNorm | RMSNorm) else (0.0, float(module.init_std))  # type: ignore[arg-type]
    return 0.0, 0.0
