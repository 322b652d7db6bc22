"""Model the time of an op from its work: a roofline with launch time and a law for small matrix products.

    time = launches * launch + max(arithmetic, traffic, elements)
    arithmetic = flops / (peak * efficiency) * (1 + half_rate_outputs / outputs) * (1 + half_rate_depth / depth)
    traffic    = bytes within the cache / its rate + the others / (bandwidth * efficiency)
    elements   = elements / (rate of that kind of op), where the device has one

A product of [m, k] and [k, n] has m * n `outputs` and `depth` k. The first factor stands for half a wave of tiles, wasted on
average; the second for the time before the first multiply-add and after the last. Each is the mean of a sawtooth, since a
model that follows the teeth would have to know which kernel the library picks.

References:
    S. Williams, A. Waterman, D. Patterson, "Roofline: An Insightful Visual Performance Model for Multicore
    Architectures", CACM 52(4), 2009. https://doi.org/10.1145/1498765.1498785
    NVIDIA, "Matrix Multiplication Background User's Guide", sections on tile and wave quantization.
"""

from dataclasses import dataclass

from recollect.costs.hardware import Hardware, Kind


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one run of an op."""

    kind: Kind
    """The limit on the op besides memory."""
    traffic_bytes: float
    """Bytes that it reads and writes, each once."""
    elements: float
    """Elements of its largest tensor."""
    dtype: str = "fp32"
    """Of the multiplications, as in `ArithmeticRate`."""
    flops: float = 0.0
    """Floating-point operations of matrix products; 0 for other ops."""
    outputs: float = 1.0
    """Elements that the matrix products compute."""
    launches: int = 1
    """Number of kernels; 0 for an op that only creates a tensor object."""


FREE = Work("copy", 0.0, 0.0, launches=0)


def seconds(work: Work, hardware: Hardware) -> float:
    cached_bytes = min(work.traffic_bytes, hardware.cache_bytes)
    limits_s = [(work.traffic_bytes - cached_bytes) / (hardware.bandwidth_bytes_per_s * hardware.traffic_efficiency)]
    if cached_bytes:
        limits_s[0] += cached_bytes / hardware.cache_bytes_per_s
    if work.kind in hardware.elements_per_s:
        limits_s.append(work.elements / hardware.elements_per_s[work.kind])
    if work.flops:
        limits_s.append(work.flops / _flops_per_s(work, hardware))
    return work.launches * hardware.launch_s + max(limits_s)


def _flops_per_s(work: Work, hardware: Hardware) -> float:
    rate = hardware.rate(work.dtype)
    efficiency = {
        "attention": rate.attention_efficiency,
        "attention_backward": rate.attention_backward_efficiency,
    }.get(work.kind, rate.matmul_efficiency)
    depth = work.flops / (2 * work.outputs)
    fill = work.outputs / (work.outputs + rate.half_rate_outputs)
    return rate.peak_flops_per_s * efficiency * fill * depth / (depth + rate.half_rate_depth)
