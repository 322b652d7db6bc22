"""The speed of a device, as frozen data: rates, bandwidths, its link to its host, and what real kernels reach of them.

The cost model (`roofline.py`) reads it, `hardware_table.py` lists devices by name, and `recollect calibrate` measures your
own. Nothing here imports torch.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from recollect.errors import HardwareError
from recollect.fields import Field, read_document

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


@dataclass(frozen=True, slots=True)
class ArithmeticRate:
    """How fast a device multiplies matrices of one dtype.

    Attributes:
        dtype: "fp32", "tf32", "fp16", "bf16", "fp8" or "fp64".
        peak_flops_per_s: dense peak (no structured sparsity), a multiply-add counted as two.
        matmul_efficiency: fraction of it that large matrix products reach.
        attention_efficiency, attention_backward_efficiency: fraction that fused attention kernels reach on long sequences.
        half_rate_outputs: elements of the result at which a matrix product reaches half its rate, since smaller ones do
            not occupy all cores: half of what the device computes at a time (half a wave of tiles).
        half_rate_depth: inner dimension at which a matrix product reaches half its rate, since smaller ones do not hide
            loads and stores of a tile.
    """

    dtype: str
    peak_flops_per_s: float
    matmul_efficiency: float = 0.8
    attention_efficiency: float = 0.5
    attention_backward_efficiency: float = 0.4
    half_rate_outputs: float = 0.0
    half_rate_depth: float = 0.0

    def __post_init__(self) -> None:
        _check_positive(f"rate {self.dtype!r}: peak_flops_per_s", self.peak_flops_per_s)
        for name in ("matmul_efficiency", "attention_efficiency", "attention_backward_efficiency"):
            _check_fraction(f"rate {self.dtype!r}: {name}", getattr(self, name))
        for name in ("half_rate_outputs", "half_rate_depth"):
            _check_not_negative(f"rate {self.dtype!r}: {name}", getattr(self, name))


@dataclass(frozen=True, slots=True)
class ElementRate:
    """Elements per second of one kind of op, where that is the limit and not memory.

    Attributes:
        kind: one of `KINDS`, such as "transcendental".
        elements_per_s: elements of the op's largest tensor, per second.
    """

    kind: str
    elements_per_s: float

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"elements {self.kind!r}: expected one of {', '.join(KINDS)}")
        _check_positive(f"elements {self.kind!r}: elements_per_s", self.elements_per_s)


@dataclass(frozen=True, slots=True)
class HostLink:
    """How fast copies between a device and the memory of its host are.

    Attributes:
        to_host_bytes_per_s: what large copies out of the device reach.
        from_host_bytes_per_s: what large copies into it reach.
        latency_s: seconds that a copy takes however little it copies.

    Raises:
        ValueError: a rate that is not finite or not positive, a latency that is not finite or negative.

    Example:
        >>> link = HostLink(to_host_bytes_per_s=25e9, from_host_bytes_per_s=25e9, latency_s=1e-5)
        >>> link.profile_fields()["host_latency_s"]
        1e-05
    """

    to_host_bytes_per_s: float
    from_host_bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        _check_positive("host_link: to_host_bytes_per_s", self.to_host_bytes_per_s)
        _check_positive("host_link: from_host_bytes_per_s", self.from_host_bytes_per_s)
        _check_not_negative("host_link: latency_s", self.latency_s)

    def profile_fields(self) -> dict[str, float]:
        """Return the numbers under their names in a `Profile`."""
        return {
            "to_host_bytes_per_s": self.to_host_bytes_per_s,
            "from_host_bytes_per_s": self.from_host_bytes_per_s,
            "host_latency_s": self.latency_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One GPU, or one CPU with some number of threads.

    Attributes:
        name: such as "NVIDIA H100 SXM".
        device: its torch device type, "cuda" or "cpu".
        memory_bytes: size of its memory.
        bandwidth_bytes_per_s: peak rate of reads and writes of that memory.
        traffic_efficiency: fraction of it that elementwise ops, copies and reductions reach.
        launch_s: seconds that the smallest op takes.
        rates: one for each dtype; "fp32" is required and stands in for missing ones.
        cache_bytes, cache_bytes_per_s: the first so many bytes that an op touches move at this rate; 0 for no cache.
        elements: kinds of ops that are limited by something other than memory.
        host_link: what connects it with the memory of its host; None if that is not known.

    Raises:
        ValueError: a number that is not finite or not positive, an efficiency above 1, a duplicate dtype or kind, no
            rate for "fp32".

    Example:
        >>> hardware = Hardware(
        ...     name="my card",
        ...     device="cuda",
        ...     memory_bytes=16 * 2**30,
        ...     bandwidth_bytes_per_s=500e9,
        ...     launch_s=5e-6,
        ...     rates=(ArithmeticRate("fp32", 20e12),),
        ... )
        >>> Hardware.from_json(hardware.to_json()) == hardware
        True
    """

    name: str
    device: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    launch_s: float
    rates: tuple[ArithmeticRate, ...]
    traffic_efficiency: float = 0.85
    cache_bytes: int = 0
    cache_bytes_per_s: float = 0.0
    elements: tuple[ElementRate, ...] = ()
    host_link: HostLink | None = None

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device: got {self.device!r}, expected 'cpu' or 'cuda'")
        for name in ("memory_bytes", "bandwidth_bytes_per_s", "launch_s"):
            _check_positive(name, getattr(self, name))
        _check_fraction("traffic_efficiency", self.traffic_efficiency)
        for name in ("cache_bytes", "cache_bytes_per_s"):
            _check_not_negative(name, getattr(self, name))
        if (self.cache_bytes > 0) != (self.cache_bytes_per_s > 0):
            raise ValueError("cache_bytes, cache_bytes_per_s: got one of them, expected both or none")
        for what, keys in (("rates", [r.dtype for r in self.rates]), ("elements", [e.kind for e in self.elements])):
            twice = next((key for key in keys if keys.count(key) > 1), None)
            if twice is not None:
                raise ValueError(f"{what}: {twice!r} is there twice, expected each once")
        if _BASE_DTYPE not in (rate.dtype for rate in self.rates):
            raise ValueError(
                f"rates: {_BASE_DTYPE!r} is missing, which stands in for dtypes without a rate of their own"
            )

    def rate(self, dtype: str) -> ArithmeticRate:
        """Return the rate of a dtype; that of "fp32" if the device has none for it."""
        by_dtype = {rate.dtype: rate for rate in self.rates}
        return by_dtype.get(dtype, by_dtype[_BASE_DTYPE])

    def to_json(self) -> str:
        """Return the hardware as JSON text; `from_json` reads it back as an equal one."""
        document = {"format": _FORMAT, "version": _VERSION}
        parts = ("rates", "elements", "host_link")
        document |= {f.name: getattr(self, f.name) for f in fields(self) if f.name not in parts}
        document["rates"] = {
            rate.dtype: {f.name: getattr(rate, f.name) for f in fields(rate) if f.name != "dtype"}
            for rate in self.rates
        }
        document["elements_per_s"] = {element.kind: element.elements_per_s for element in self.elements}
        if self.host_link is not None:
            document["host_link"] = asdict(self.host_link)
        return json.dumps(document, indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Hardware:
        """Read what `to_json` or `recollect calibrate` wrote; numbers may be edited by hand.

        Raises:
            HardwareError: no JSON, not of this format, a later version, or a number that cannot be; says where.
        """
        root = read_document(text, format=_FORMAT, version=_VERSION, error=HardwareError)
        names = [f.name for f in fields(cls) if f.name != "elements"]
        root.keys(allowed=["format", "version", *names, "elements_per_s"])
        given = root.arguments(cls, least={"memory_bytes": None, "cache_bytes": None}, is_whole=True)
        rates, elements, link = root.get("rates"), root.get("elements_per_s"), root.find("host_link")
        try:
            return cls(
                rates=tuple(_decode(ArithmeticRate, rates.get(dtype), dtype) for dtype in rates.keys()),
                elements=tuple(ElementRate(kind, elements.get(kind).number()) for kind in elements.keys()),
                host_link=None if link is None else _decode(HostLink, link),
                **given,
            )
        except ValueError as problem:
            if isinstance(problem, HardwareError):
                raise
            raise HardwareError(str(problem)) from None

    @classmethod
    def load(cls, path: str | Path) -> Hardware:
        """Read a file that `recollect calibrate` wrote.

        Raises:
            HardwareError: the file cannot be read, or does not hold hardware; names the file.
        """
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


def _decode(kind: type, place: Field, *given: str) -> Any:
    """Return a record of numbers, but for the first fields if they are given."""
    names = [f.name for f in fields(kind)[len(given) :]]
    place.keys(allowed=names)
    return kind(*given, *(place.get(name).number() for name in names))


def _check_positive(what: str, number: float) -> None:
    """Raise ValueError for a number that is not finite, or 0 or less; `what` says which one."""
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{what}: got {number}, expected a finite number above 0")


def _check_not_negative(what: str, number: float) -> None:
    """Raise ValueError for a number that is not finite, or less than 0; `what` says which one."""
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{what}: got {number}, expected a finite number, 0 or more")


def _check_fraction(what: str, number: float) -> None:
    """Raise ValueError for a number that is not above 0 and at most 1; `what` says which one."""
    if not 0 < number <= 1:
        raise ValueError(f"{what}: got {number}, expected a fraction above 0, at most 1")
