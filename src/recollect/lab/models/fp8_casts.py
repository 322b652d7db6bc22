"""Casts to 8 bits, block by block, and the scales that undo them.

Each block of r x c elements of a matrix [R, C] has its own scale, in a matrix [R / r, C / c]; a whole matrix is one
block, too. The shapes of both say what a block is. Further dimensions, in front, are separate matrices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recollect.lab.models.config import TransformerConfig

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
_LARGEST = torch.finfo(torch.float32).max
# The largest number of a format is 1.75 times 2 to this.
_EXPONENTS = {E4M3: 8, E5M2: 15}


class Cast(NamedTuple):
    """A matrix in 8 bits."""

    values: Tensor
    """[..., R, C], one byte each."""
    scale: Tensor
    """The factor of each block; fp32, or E8M0 (a power of two in one byte)."""

    @property
    def mT(self) -> Cast:  # noqa: N802, as of tensors
        """The transposed matrix; nothing is copied."""
        return Cast(self.values.mT, self.scale.mT)

    def part(self, dim: int, start: int, end: int) -> Cast:
        """Return the rows (dim -2) or columns (-1) from `start` to `end`, which are whole blocks; nothing is copied."""
        length = self.values.shape[dim] // self.scale.shape[dim]
        if length == self.values.shape[dim]:
            return Cast(self.values.narrow(dim, start, end - start), self.scale)
        parts = self.scale.narrow(dim, start // length, (end - start) // length)
        return Cast(self.values.narrow(dim, start, end - start), parts)

    def whole(self) -> Tensor:
        """Return the matrix in fp32, to multiply in fp32 where a device would in 8 bits."""
        blocks = _blocks(self.values, self.scale.shape).float().mul_(_over_blocks(self.scale.float()))
        return blocks.flatten(-4, -3).flatten(-2)


def _blocks(matrix: Tensor, counts: Sequence[int]) -> Tensor:
    """View a matrix as [..., rows of blocks, r, columns of blocks, c]."""
    return matrix.unflatten(-1, (counts[-1], -1)).unflatten(-3, (counts[-2], -1))


def _over_blocks(scale: Tensor) -> Tensor:
    return scale.unsqueeze(-1).unsqueeze(-3)


def cast(matrix: Tensor, multiplier: Tensor, dtype: torch.dtype, scale_dtype: torch.dtype = torch.float32) -> Cast:
    """Multiply each block in fp32, round to nearest even, and saturate: values too large become the largest number."""
    top = torch.finfo(dtype).max
    scaled = (_blocks(matrix, multiplier.shape) * _over_blocks(multiplier)).clamp_(-top, top).to(dtype)
    return Cast(scaled.flatten(-4, -3).flatten(-2), multiplier.reciprocal().to(scale_dtype))


def multiplier_of(amax: Tensor, dtype: torch.dtype, *, margin: int = 0) -> Tensor:
    """Return the factor that maps a block's largest magnitude to the largest number of a format: `largest / amax`, in fp32.

    1 where that magnitude is 0, infinite or nan.
    """
    amax = amax.float()
    # Not a number divided by a tensor, which PyTorch rounds twice.
    multiplier = (amax.new_full((), torch.finfo(dtype).max / 2**margin) / amax).clamp(max=_LARGEST)
    return torch.where(is_usable(amax), multiplier, 1.0)


def power_of_two_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `largest / amax` rounded down to a power of two: a cast then changes values only by rounding to 8 bits.

    At least 2 to the -126, at most 2 to the 127, the value for zeros.
    """
    # Exact, on every device: 1.75 * 2^k / (m * 2^e) is at least 2^(k - e) if m <= 1.75; adding a quarter less one bit to a
    # larger m carries into the exponent, which is stored with 127 more.
    exponent = (amax.float().view(torch.int32) + 0x1FFFFF) >> 23
    return ((254 + _EXPONENTS[dtype] - exponent).clamp(1, 254) << 23).view(torch.float32)


def is_usable(amax: Tensor) -> Tensor:
    """Return where a scale exists: not for zeros, infinities and nans."""
    return (amax > 0) & (amax < math.inf)


def cast_blocks(matrix: Tensor, rows: int, columns: int, dtype: torch.dtype, scale_dtype: torch.dtype) -> Cast:
    """Cast a matrix with a power of two for each block of `rows` x `columns`."""
    counts = (matrix.shape[-2] // rows, matrix.shape[-1] // columns)
    amax = torch.linalg.vector_norm(_blocks(matrix, counts), math.inf, dim=(-3, -1))
    return cast(matrix, power_of_two_of(amax, dtype), dtype, scale_dtype)


class DelayedScaling(nn.Module):
    """Scale a tensor by the largest magnitudes that it had before.

    In each forward in training (of a gradient: in each backward) these things happen, in this order: the tensor is cast with
    the current multiplier; its largest magnitude becomes row 0 of the history; the multiplier is set from the largest
    row, or from row 0, and is unchanged where that is 0 or infinite; the history is rolled by -1, and its row 0 is zero.

    Transformer Engine does this when an outermost `autocast` ends, which Megatron opens once for each micro-batch, and
    when a backward ends (`nvte_delayed_scaling_recipe_amax_and_scale_update`, recipe.h, release 2.8). It takes the largest
    magnitude over the ranks of a group; this does not.

    Each cast has a copy of the multiplier, which is one of the values of its forward: a rerun of the cast, after other
    micro-batches have changed the multiplier, uses the same one. A plan sees that copy and each update, and so
    notices an update outside of forward; it does not see, and never runs again, updates of the history.

    `groups` tensors, such as experts, have their own. `amax_history` is [fp8_amax_history_len, groups], fp32, zeros at first;
    `multiplier`, which Transformer Engine calls the scale, is [groups], fp32, ones at first.
    """

    def __init__(self, config: TransformerConfig, groups: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.margin, self.dtype = config.fp8_margin, dtype
        self.is_largest = config.fp8_amax_compute_algo == "max"
        self.register_buffer("amax_history", torch.zeros(config.fp8_amax_history_len, groups))
        self.register_buffer("multiplier", torch.ones(groups))
        self.amax_history: Tensor
        self.multiplier: Tensor

    def _apply(self, fn: Any, recurse: bool = True) -> DelayedScaling:
        """Follow the model to a device, but not to its dtype."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.amax_history, self.multiplier = self.amax_history.float(), self.multiplier.float()
        return self

    def forward(self, amax: Tensor, *, is_recorded: bool) -> Tensor:
        """Return a copy of the multipliers as they are, then update them if that is recorded."""
        current = self.multiplier.clone()
        if is_recorded:
            self.multiplier.copy_(self._updated(amax))
        return current

    @torch.no_grad()
    def _updated(self, amax: Tensor) -> Tensor:
        history = torch.cat((amax.float().unsqueeze(0), self.amax_history[1:]))
        largest = history.amax(dim=0) if self.is_largest else history[0]
        updated = multiplier_of(largest, self.dtype, margin=self.margin)
        rolled = history.roll(-1, 0)
        rolled[0] = 0
        self.amax_history.copy_(rolled)
        return torch.where(is_usable(largest), updated, self.multiplier)
