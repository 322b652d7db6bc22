"""The speed of a device, as frozen data: rates, bandwidths, its link to its host, and the share that real kernels reach.

The cost model (`roofline.py`) reads it, `hardware_table.py` lists devices by name, and `recollect calibrate` measures your
own. Nothing here imports torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, get_args

from recollect.errors import HardwareError
from recollect.fields import read_document
from recollect.profile.host_times import HostTimes

# What limits an op, apart from memory.
Kind = Literal[
    "matmul",
    "attention",
    "attention_backward",
    "copy",
    "elementwise",
    "transcendental",
    "reduction",
    "softmax",
    "random",
    "gather",
    "scatter",
    "sort",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

_FORMAT = "recollect.hardware"
_VERSION = 1
_BASE_DTYPE = "fp32"
EIGHT_BITS = ("fp8", "fp8_blockwise", "mxfp8")
"""Rates of products in 8 bits: with a scale for a tensor or row, for each block of 128, for each 32 elements."""

_POSITIVE, _NOT_NEGATIVE = "a finite number above 0", "a finite number, 0 or more"
_FRACTION = "a fraction above 0, at most 1"
_FITS: dict[str, Callable[[float], bool]] = {
    _POSITIVE: lambda number: number > 0,
    _NOT_NEGATIVE: lambda number: number >= 0,
    _FRACTION: lambda number: 0 < number <= 1,
}


@dataclass(frozen=True, slots=True)
class ArithmeticRate:
    """How fast a device multiplies matrices of one dtype."""

    dtype: str
    """One of "fp32", "tf32", "fp16", "bf16", "fp64", and `EIGHT_BITS`."""
    peak_flops_per_s: float
    """Dense peak (no structured sparsity), a multiply-add counted as two."""
    matmul_efficiency: float = 0.8
    """Fraction of it that large matrix products reach."""
    attention_efficiency: float = 0.5
    attention_backward_efficiency: float = 0.4
    """Fraction that fused attention kernels reach on long sequences."""
    half_rate_outputs: float = 0.0
    """Elements of the result at which a matrix product reaches half its rate, since smaller ones do not occupy all cores:
    half of the elements that the device computes at a time (half a wave of tiles)."""
    half_rate_depth: float = 0.0
    """Inner dimension at which a matrix product reaches half its rate, since smaller ones do not hide loads and stores of a
    tile."""

    def __post_init__(self) -> None:
        where = f"rate {self.dtype!r}: "
        _check(self, _POSITIVE, "peak_flops_per_s", where=where)
        efficiencies = ("matmul_efficiency", "attention_efficiency", "attention_backward_efficiency")
        _check(self, _FRACTION, *efficiencies, where=where)
        _check(self, _NOT_NEGATIVE, "half_rate_outputs", "half_rate_depth", where=where)


@dataclass(frozen=True, slots=True)
class HostLink:
    """How fast copies between a device and the memory of its host are."""

    to_host_bytes_per_s: float
    """Rate of large copies out of the device."""
    from_host_bytes_per_s: float
    """Rate of large copies into it."""
    latency_s: float
    """Seconds of the smallest copy."""

    def __post_init__(self) -> None:
        _check(self, _POSITIVE, "to_host_bytes_per_s", "from_host_bytes_per_s", where="host_link: ")
        _check(self, _NOT_NEGATIVE, "latency_s", where="host_link: ")

    def profile_fields(self) -> dict[str, float]:
        """Return the numbers under their names in a `Profile`."""
        return {
            "to_host_bytes_per_s": self.to_host_bytes_per_s,
            "from_host_bytes_per_s": self.from_host_bytes_per_s,
            "host_latency_s": self.latency_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One GPU, or one CPU with some number of threads."""

    name: str
    """Such as "NVIDIA H100 SXM"."""
    device: str
    """Its torch device type, "cuda" or "cpu"."""
    memory_bytes: int
    bandwidth_bytes_per_s: float
    """Peak rate of reads and writes of that memory."""
    launch_s: float
    """Seconds that the smallest op takes."""
    rates: tuple[ArithmeticRate, ...]
    """One for each dtype; "fp32" is required and stands in for missing ones."""
    traffic_efficiency: float = 0.85
    """Fraction of it that elementwise ops, copies and reductions reach."""
    cache_bytes: int = 0
    cache_bytes_per_s: float = 0.0
    """Bytes per op that move at this rate, from the first; 0 for no cache."""
    elements_per_s: Mapping[str, float] = field(default_factory=dict)
    """Of ops that are limited by something other than memory, by their kind, one of `KINDS`: elements of their largest
    tensor, per second."""
    host_link: HostLink | None = None
    """Its link to host memory; None if unknown."""
    host: HostTimes | None = None
    """Overhead of Python and PyTorch around ops on its host; None if unknown, and counted as 0."""

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device: got {self.device!r}, expected 'cpu' or 'cuda'")
        _check(self, _POSITIVE, "memory_bytes", "bandwidth_bytes_per_s", "launch_s")
        _check(self, _FRACTION, "traffic_efficiency")
        _check(self, _NOT_NEGATIVE, "cache_bytes", "cache_bytes_per_s")
        if (self.cache_bytes > 0) != (self.cache_bytes_per_s > 0):
            raise ValueError("cache_bytes, cache_bytes_per_s: got one of them, expected both or none")
        for kind, number in self.elements_per_s.items():
            if kind not in KINDS:
                raise ValueError(f"elements {kind!r}: expected one of {', '.join(KINDS)}")
            if not (math.isfinite(number) and number > 0):
                raise ValueError(f"elements {kind!r}: elements_per_s: got {number}, expected {_POSITIVE}")
        dtypes = [rate.dtype for rate in self.rates]
        if twice := [dtype for dtype in dtypes if dtypes.count(dtype) > 1]:
            raise ValueError(f"rates: {twice[0]!r} appears twice, expected each once")
        if _BASE_DTYPE not in dtypes:
            raise ValueError(f"rates: {_BASE_DTYPE!r} is missing, which stands in for dtypes without their own rate")

    def rate(self, dtype: str) -> ArithmeticRate:
        """Return the rate of a dtype; the "fp32" rate if the device has none for it, which is an error for 8-bit dtypes."""
        by_dtype = {rate.dtype: rate for rate in self.rates}
        if dtype in EIGHT_BITS and dtype not in by_dtype:
            raise HardwareError(
                f"{self.name}: got a matrix product in {dtype}, for which it has no kernel, expected one in "
                f"{', '.join(by_dtype)}. Choose a different device or recipe, or emulate it (--fp8-emulated)."
            )
        return by_dtype.get(dtype, by_dtype[_BASE_DTYPE])

    def to_json(self) -> str:
        document = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        document["rates"] = {rate.pop("dtype"): rate for rate in document["rates"]}
        document = {key: value for key, value in document.items() if value is not None}
        return json.dumps(document, indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Hardware:
        """Read JSON written by `to_json` or `recollect calibrate`; numbers may be edited by hand."""
        root = read_document(text, format=_FORMAT, version=_VERSION, error=HardwareError, needs_all_keys=True)
        rates = root.get("rates").members().items()
        return root.record(cls, rates=tuple(rate.record(ArithmeticRate, dtype=dtype) for dtype, rate in rates))

    @classmethod
    def load(cls, path: str | Path) -> Hardware:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            raise HardwareError(
                f"{path}: cannot be read ({problem}), expected a file that `recollect calibrate` wrote."
            ) from None
        try:
            return cls.from_json(text)
        except HardwareError as error:
            raise HardwareError(f"{path}: {error}") from None


def _check(source: object, expected: str, *names: str, where: str = "") -> None:
    """Raise ValueError for a field that is not as expected; `where` names its owner."""
    for name in names:
        number = getattr(source, name)
        if not (math.isfinite(number) and _FITS[expected](number)):
            raise ValueError(f"{where}{name}: got {number}, expected {expected}")
