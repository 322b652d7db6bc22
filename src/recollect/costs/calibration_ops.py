"""Collect the ops that `recollect calibrate` measures, by running plain PyTorch code once.

So calibration measures the kernels that training on this device runs, attention's forward and backward included, and the
cost model derives their work from the same arguments as it does for a model.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout, embedding, gelu, layer_norm, scaled_dot_product_attention, silu

from recollect._torch_private import TorchDispatchMode
from recollect.costs.op_work import work_of
from recollect.costs.roofline import Work
from recollect.engine.facts import facts_of

# Width of normalised and looked-up rows, and sizes of attention: as in models.
_WIDTH = 256
_HEADS, _HEAD_WIDTH = 8, 64
_TINY_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the measured tensors.

    Attributes:
        elements: of the tensors of elementwise and similar ops; the first so few that only the launch counts.
        products: (m, n, k) of matrix products, large and thin ones.
        tokens: sequence lengths of attention.
    """

    elements: tuple[int, ...]
    products: tuple[tuple[int, int, int], ...]
    tokens: tuple[int, ...]

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
        """Median seconds of its runs."""
        return statistics.median(self.seconds)

    def run(self) -> None:
        """Run it once more; call it below autograd."""
        self.func(*self.args, **self.kwargs)


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
    """Run some programs once and return the ops that they dispatch.

    Args:
        device: where they run.
        dtypes: of matrix products and attention; all else runs in fp32, since its speed depends on bytes.
        sizes: of their tensors.
    """
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
