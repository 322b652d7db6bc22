"""The FP8 recipes again, from their definitions: plain loops in NumPy, with none of the code under test.

Sources: the OCP formats E4M3 and E5M2 (bias 7 and 15, nearest even), E8M0 of the OCP Microscaling Formats, and the recipes of
Transformer Engine's documentation.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
TOPS = {"e4m3": 448.0, "e5m2": 57344.0}


def numbers_of(name: str) -> Array:
    """All finite numbers of a format that are not negative, in the order of their codes."""
    mantissa_bits, bias, last = (3, 7, 0x7E) if name == "e4m3" else (2, 15, 0x7B)
    found = []
    for code in range(last + 1):
        exponent, fraction = code >> mantissa_bits, (code & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
        found.append(math.ldexp(1 + fraction, exponent - bias) if exponent else math.ldexp(fraction, 1 - bias))
    return np.array(found)


def rounded(values: Array, name: str) -> Array:
    """Nearest numbers of a format, of two as near the one with the even code; too large ones become the largest."""
    numbers = numbers_of(name)
    sizes = np.minimum(np.abs(values.astype(np.float64)), numbers[-1])
    above = np.searchsorted(numbers, sizes).clip(1)
    below = above - 1
    to_below, to_above = sizes - numbers[below], numbers[above] - sizes
    is_below = (to_below < to_above) | ((to_below == to_above) & (below % 2 == 0))
    return np.copysign(np.where(is_below, numbers[below], numbers[above]), values).astype(np.float32)


def amax_of(values: Array) -> np.float32:
    return np.float32(np.abs(values).max()) if values.size else np.float32(0)


def scale_of(amax: np.float32, name: str, margin: int = 0) -> np.float32:
    """`largest / amax` in fp32; 1 where it cannot be found."""
    if not 0 < amax < np.inf:
        return np.float32(1)
    with np.errstate(over="ignore"):
        quotient = np.float32(TOPS[name] / 2**margin) / amax
    return min(quotient, np.finfo(np.float32).max)


def power_of(amax: np.float32, name: str) -> np.float32:
    """The largest power of two by which nothing is larger than the largest number: by trying all."""
    powers = [n for n in range(-126, 128) if float(amax) * 2.0**n <= TOPS[name]]
    return np.float32(2.0 ** max(powers))


def cast_blocks(matrix: Array, rows: int, columns: int, name: str) -> tuple[Array, Array]:
    """Values in 8 bits, and what each block was multiplied by."""
    values = np.empty(matrix.shape, np.float32)
    multipliers = np.empty((matrix.shape[0] // rows, matrix.shape[1] // columns), np.float32)
    for i in range(multipliers.shape[0]):
        for j in range(multipliers.shape[1]):
            block = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            multipliers[i, j] = power_of(amax_of(matrix[block]), name)
            values[block] = rounded(matrix[block] * multipliers[i, j], name)
    return values, multipliers


@dataclass
class History:
    """Delayed scaling of one tensor, forward by forward: what `nvte_delayed_scaling_recipe_amax_and_scale_update` says."""

    length: int
    is_largest: bool
    name: str
    margin: int = 0
    scale: np.float32 = np.float32(1)
    rows: list[np.float32] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows = [np.float32(0)] * self.length

    def next_scale(self, tensor: Array) -> np.float32:
        """The scale to cast with; then the update for the next forward."""
        used = self.scale
        self.rows[0] = amax_of(tensor)
        largest = max(self.rows) if self.is_largest else self.rows[0]
        if 0 < largest < np.inf:
            self.scale = scale_of(largest, self.name, self.margin)
        self.rows = [*self.rows[1:], self.rows[0]]
        self.rows[0] = np.float32(0)
        return used
