"""Measure a device and fit the cost model to it.

The fit finds the parameters of `roofline.py`, first for memory and elements, then for matrix products. It minimises the
squared logarithm of modelled over measured time: a factor of two counts the same for long and short ops. The loss is robust: an
op that the model does not describe cannot spoil the others. Copies to and from the host's memory are
measured, not fitted.

The ops are those that plain PyTorch code dispatches: the kernels that training on this device runs, attention's forward and
backward included, with work derived from the same arguments as for a model.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import least_squares
from torch import Tensor
from torch.nn.functional import dropout, embedding, gelu, layer_norm, scaled_dot_product_attention, silu

from recollect._torch_private import TorchDispatchMode, below_autograd
from recollect.costs.hardware import KINDS, ArithmeticRate, Hardware
from recollect.costs.hardware_table import hardware_of_device, processor_model
from recollect.costs.host_copies import measure_host_link
from recollect.costs.op_work import DTYPES, work_of
from recollect.costs.roofline import Work, seconds
from recollect.engine.facts import facts_of
from recollect.errors import HardwareError
from recollect.measuring.device_memory import memory_bytes
from recollect.measuring.timing import timed_work

_DTYPES = (torch.float32, torch.bfloat16)
_PRODUCT_KINDS = ("matmul", "attention", "attention_backward")
_ELEMENT_KINDS = tuple(kind for kind in KINDS if kind not in _PRODUCT_KINDS)
_FEWEST_ROUNDS = 3
_MOST_ROUNDS = 30
_RUNS_PER_EVENT = 10
# Width of normalised and looked-up rows, and sizes of attention: as in models.
_WIDTH = 256
_HEADS, _HEAD_WIDTH = 8, 64
_TINY_BYTES = 1024

_Range = tuple[float, float, float]
"""A number's initial guess, lower bound and upper bound."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the measured tensors."""

    elements: tuple[int, ...]
    """Sizes of tensors for elementwise and similar ops; the first are so small that only the launch counts."""
    products: tuple[tuple[int, int, int], ...]
    """(m, n, k) of matrix products, large and thin ones."""
    tokens: tuple[int, ...]
    """Sequence lengths of attention."""

    @classmethod
    def of(cls, device: torch.device, *, quick: bool) -> Sizes:
        """Return sizes for ops of some milliseconds on this type of device; `quick`: smaller ones, for a rough answer."""
        if quick:
            return cls((64, 1 << 14, 1 << 18), ((64, 64, 64), (256, 256, 256), (256, 16, 256)), (64, 128))
        if device.type == "cuda":
            # The largest exceed any cache; all arguments are alive at once, about 8 GB.
            return cls((64, 1 << 18, 1 << 21, 1 << 25), _products(4096), (1024, 4096))
        return cls((64, 1 << 14, 1 << 17, 1 << 20, 1 << 23), _products(512), (256, 1024))


def _products(width: int) -> tuple[tuple[int, int, int], ...]:
    """Return square products around a width, and some that are short in one dimension."""
    half, double, thin = width // 2, 2 * width, width // 8
    squares = ((half, half, half), (width, width, width), (double, double, width))
    return (*squares, (width, thin, width), (thin, width, width), (width, width, thin), (width, thin // 8, width))


@dataclass(slots=True)
class MeasuredOp:
    """One op with its arguments, its work, and the seconds of its runs; `is_tiny`: its launch dominates."""

    name: str
    work: Work
    func: Any
    args: Any
    kwargs: Any
    is_tiny: bool
    seconds: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    def run(self) -> None:
        """Run it once more; call it below autograd."""
        self.func(*self.args, **self.kwargs)


@dataclass(frozen=True)
class Calibration:
    """A fitted device and its measurements."""

    hardware: Hardware
    ops: tuple[MeasuredOp, ...]
    rounds: int
    """Runs of each op; its time is their median."""
    elapsed_s: float

    def ratios(self, kind: str | None = None) -> list[float]:
        """Return modelled over measured time of the ops of a kind, or of all."""
        return [seconds(op.work, self.hardware) / op.median_s for op in self.ops if kind in (None, op.work.kind)]


def calibrate(device: torch.device, *, seconds_to_spend: float = 40.0, quick: bool = False) -> Calibration:
    """Measure a device and fit the cost model to it.

    The CPU runs with the number of threads that PyTorch is set to. Each op runs at least three times, however few seconds are
    to be spent. `quick` takes smaller tensors, for seconds instead of a minute, but rates far from the device's best.
    """
    if device.type not in ("cpu", "cuda"):
        raise HardwareError(f"device: got {str(device)!r}, expected cpu or cuda; others are not measured.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise HardwareError("device: got cuda, but PyTorch finds no CUDA device here; expected cpu.")
    begin = time.perf_counter()
    # Events are of the current device.
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with current, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        ops = calibration_ops(device, _DTYPES, Sizes.of(device, quick=quick))
        rounds = _measure(ops, device, until=begin + (0.0 if quick else seconds_to_spend))
    fitted = fit(_blank(device), ops, hardware_of_device(_device_name(device)))
    hardware = replace(fitted, host_link=measure_host_link(device))
    return Calibration(hardware, tuple(ops), rounds, time.perf_counter() - begin)


def _measure(ops: Sequence[MeasuredOp], device: torch.device, *, until: float) -> int:
    """Run all ops in turn: a slow moment of the machine affects each of them a little and none much."""
    time_op = _cuda_seconds if device.type == "cuda" else lambda run: timed_work(run, device)[1]
    rounds = 0
    with below_autograd():
        for op in ops:
            time_op(op.run)  # does not count: the first run loads kernels
        while rounds < _FEWEST_ROUNDS or (rounds < _MOST_ROUNDS and time.perf_counter() < until):
            for op in ops:
                op.seconds.append(time_op(op.run))
            rounds += 1
    return rounds


def _cuda_seconds(run: Callable[[], None]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(_RUNS_PER_EVENT):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / _RUNS_PER_EVENT


def _blank(device: torch.device) -> Hardware:
    return Hardware(
        name=_device_name(device),
        device=device.type,
        memory_bytes=memory_bytes(device) or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        bandwidth_bytes_per_s=1.0,
        traffic_efficiency=1.0,
        launch_s=1.0,
        rates=tuple(ArithmeticRate(DTYPES[dtype], 1.0) for dtype in _DTYPES),
    )


def fit(start: Hardware, ops: Sequence[MeasuredOp], known: Hardware | None) -> Hardware:
    """Return the hardware that fits the measurements, of ops of every kind and matrix products of each dtype in `start.rates`.

    If the device is `known` in the table, efficiencies are fractions of its peaks.
    """
    simple = [op for op in ops if not op.work.flops]
    fitted = _least_errors(simple, _memory_ranges(simple), partial(_with_memory, start))
    for rate in start.rates:
        products = [op for op in ops if op.work.flops and op.work.dtype == rate.dtype]
        fitted = _least_errors(products, _rate_ranges(products), partial(_with_rate, fitted, rate.dtype))
    return fitted if known is None else _against_peaks(fitted, known)


def _memory_ranges(ops: Sequence[MeasuredOp]) -> list[_Range]:
    """Return the ranges of launch time, bandwidth, rate and size of the cache, and rates of elements.

    Some measured ops have to exceed the cache, or the bandwidth would be undetermined.
    """
    most_bytes = max(op.work.traffic_bytes for op in ops)
    shortest_s, launch_s = min(op.median_s for op in ops), statistics.median(op.median_s for op in ops if op.is_tiny)
    large = max(op.work.traffic_bytes / op.median_s for op in ops if op.work.traffic_bytes > most_bytes / 4)
    best = max(op.work.traffic_bytes / op.median_s for op in ops)
    ranges = [
        (launch_s, shortest_s / 2, 4 * launch_s),
        (large, large / 10, 2 * large),
        (best, large / 10, 2 * best),
        (most_bytes / 16, most_bytes / 1e4, most_bytes / 4),
    ]
    for kind in _ELEMENT_KINDS:
        fastest = max(op.work.elements / op.median_s for op in ops if op.work.kind == kind)
        ranges.append((fastest, fastest / 10, 2 * fastest))
    return ranges


def _rate_ranges(ops: Sequence[MeasuredOp]) -> list[_Range]:
    """Return the ranges of the rates of products and attention: at most slightly above the best measured."""
    ranges = []
    for kind in _PRODUCT_KINDS:
        fastest = max(op.work.flops / op.median_s for op in ops if op.work.kind == kind)
        ranges.append((fastest, fastest / 4, 1.5 * fastest))
    products = [op.work for op in ops if op.work.kind == "matmul"]
    most_outputs = max(work.outputs for work in products)
    most_depth = max(work.flops / 2 / work.outputs for work in products)
    return [*ranges, (most_outputs / 100, 1.0, most_outputs), (most_depth / 20, 1.0, most_depth)]


def _with_memory(hardware: Hardware, numbers: Sequence[float]) -> Hardware:
    launch_s, bandwidth, cache_rate, cache_bytes, *elements = numbers
    return replace(
        hardware,
        launch_s=launch_s,
        bandwidth_bytes_per_s=bandwidth,
        cache_bytes_per_s=cache_rate,
        cache_bytes=round(cache_bytes),
        elements_per_s=dict(zip(_ELEMENT_KINDS, elements, strict=True)),
    )


def _with_rate(hardware: Hardware, dtype: str, numbers: Sequence[float]) -> Hardware:
    *achieved, half_rate_outputs, half_rate_depth = numbers
    peak = max(achieved)
    matmul, attention, attention_backward = (number / peak for number in achieved)
    fitted = ArithmeticRate(dtype, peak, matmul, attention, attention_backward, half_rate_outputs, half_rate_depth)
    return replace(hardware, rates=tuple(fitted if rate.dtype == dtype else rate for rate in hardware.rates))


def _least_errors(
    ops: Sequence[MeasuredOp], ranges: Sequence[_Range], hardware_of: Callable[[Sequence[float]], Hardware]
) -> Hardware:
    """Return the hardware that minimises the squared logarithms of modelled over measured time."""

    def residuals(logarithms: NDArray[np.float64]) -> list[float]:
        hardware = hardware_of([math.exp(number) for number in logarithms])
        return [math.log(seconds(op.work, hardware) / op.median_s) for op in ops]

    guess, least, most = np.log(ranges).T
    found = least_squares(residuals, guess, bounds=(least, most), loss="soft_l1", f_scale=0.3, diff_step=1e-3)
    return hardware_of([math.exp(number) for number in found.x])


def _against_peaks(fitted: Hardware, known: Hardware) -> Hardware:
    """Express measured rates as fractions of a data sheet's peaks, and keep its dtypes that were not measured."""
    measured = {rate.dtype: rate for rate in fitted.rates}
    rates = []
    for rate in known.rates:
        found = measured.get(rate.dtype)
        if found is None:
            rates.append(rate)
            continue
        of_peak = found.peak_flops_per_s / rate.peak_flops_per_s
        names = ("matmul_efficiency", "attention_efficiency", "attention_backward_efficiency")
        fractions = {name: min(1.0, of_peak * getattr(found, name)) for name in names}
        rates.append(replace(found, peak_flops_per_s=rate.peak_flops_per_s, **fractions))
    efficiency = min(1.0, fitted.bandwidth_bytes_per_s / known.bandwidth_bytes_per_s)
    return replace(
        fitted,
        rates=tuple(rates),
        bandwidth_bytes_per_s=known.bandwidth_bytes_per_s,
        traffic_efficiency=efficiency,
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{processor_model()}, {threads} thread{'' if threads == 1 else 's'}"


class _Noting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[MeasuredOp] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        work = work_of(func, facts_of(func), args, kwargs, output)
        if work.launches:
            self.ops.append(
                MeasuredOp(facts_of(func).name, work, func, args, kwargs, work.traffic_bytes <= _TINY_BYTES)
            )
        return output


def calibration_ops(device: torch.device, dtypes: Sequence[torch.dtype], sizes: Sizes) -> list[MeasuredOp]:
    """Run some programs once and return the ops that they dispatch."""
    noting = _Noting()
    for num_elements in sizes.elements:
        width = min(num_elements, _WIDTH)
        rows = [torch.randn(num_elements // width, width, device=device, requires_grad=True) for _ in range(2)]
        with noting:
            for program in (_elementwise, _transcendental, _normalised, _looked_up):
                program(*rows)
    for dtype in dtypes:
        for num_rows, num_columns, depth in sizes.products:
            left = torch.randn(num_rows, depth, device=device, dtype=dtype)
            right = torch.randn(num_columns, depth, device=device, dtype=dtype)
            with noting:
                torch.mm(left, right.t())
        for tokens in sizes.tokens:
            heads = torch.randn(3, 1, _HEADS, tokens, _HEAD_WIDTH, device=device, dtype=dtype, requires_grad=True)
            with noting:
                query, key, value = heads.unbind()
                scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()
    return noting.ops


def _elementwise(left: Tensor, right: Tensor) -> None:
    product = (left * right + left) * right[0]
    swapped = product.t().contiguous()
    torch.cat([swapped, swapped]).bfloat16()
    dropout(product, 0.1).sum().backward()


def _transcendental(left: Tensor, right: Tensor) -> None:
    (silu(left) + gelu(right) + left.tanh()).sum().backward()
    left.detach().cos()


def _normalised(left: Tensor, right: Tensor) -> None:
    normed = layer_norm(left, left.shape[-1:]) * (right.pow(2).mean(-1, keepdim=True) + 1).rsqrt()
    (normed.softmax(-1) + right.log_softmax(-1)).sum().backward()


def _looked_up(left: Tensor, right: Tensor) -> None:
    order = torch.randint(left.shape[0], left.shape[:1], device=left.device)
    (embedding(order, left) + right[order]).sum().backward()
    left.detach().topk(min(8, left.shape[-1]))
