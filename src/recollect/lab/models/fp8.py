"""Matrix products in 8 bits, by four recipes; backward reads the saved casts, one byte per element, not the originals.

| recipe | blocks with a scale: input, gradient | weight | scales | in backward |
|---|---|---|---|---|
| delayed | all | all | fp32, of forwards before | forward's casts |
| tensorwise | all | all | fp32, of this tensor | forward's casts |
| blockwise | 1 x 128 | 128 x 128 | fp32, powers of two | the input cast along the tokens, the weight's forward cast |
| mxfp8 | 1 x 32 | 1 x 32 | E8M0, powers of two | both cast along the other dimension |

Blocks lie along the dimension that a product sums over, and backward sums over others than forward: over the tokens for the
gradient of a weight, over the output channels for that of an input. So where forward and backward need blocks
of different directions, forward casts twice and drops the first cast: every recipe saves one byte per element. That Transformer
Engine saves as much is from memory, not checked against its code. For a plan, the cast is a value like any
other: it may be kept, or run again from the 16 bits before it.

Definitions follow Transformer Engine's recipes DelayedScaling, Float8CurrentScaling, Float8BlockScaling and
MXFP8BlockScaling. Experts are separate tensors, as in its GroupedLinear: each has its own scales.

Shape legend: N tokens   I, O input and output channels   E experts   S rows of all experts
    Of kernels: M, K rows and summed channels of the left matrix   P rows of the right one
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recollect._torch_private import is_fake_tensor
from recollect.errors import DataError, HardwareError
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.config_checks import FP8_MULTIPLES
from recollect.lab.models.fp8_casts import E4M3, E5M2, E8M0, Cast, DelayedScaling, cast, cast_blocks, multiplier_of
from recollect.recording.fake_model import kernels_of

_BLOCKS = {"blockwise": 128, "mxfp8": 32}
_TYPES, _SWIZZLES = F.ScalingType, F.SwizzleType
# The compute capabilities with kernels, first and last.
_CAPABILITIES = {"delayed": (8.9, 99.0), "tensorwise": (8.9, 99.0), "blockwise": (9.0, 9.9), "mxfp8": (10.0, 99.0)}
# By number, since a Function that gets a module cannot run again: the module may have changed by then. These only say
# how to multiply; backward reads their changing parts. Copies of a module have their own numbers.
_numbers: weakref.WeakKeyDictionary[Fp8Product, int] = weakref.WeakKeyDictionary()
_products: weakref.WeakValueDictionary[int, Fp8Product] = weakref.WeakValueDictionary()
_next_number = itertools.count().__next__


class Fp8Product(nn.Module):
    """The product of a linear layer, or with `groups` of them of all experts, in 8 bits.

    `is_grouped` uses one grouped kernel for the experts, instead of a loop over them.
    """

    def __init__(self, config: TransformerConfig, groups: int = 0, *, is_grouped: bool = False) -> None:
        super().__init__()
        self.groups = groups
        self.recipe, self.emulated, self.is_grouped = config.fp8_recipe, config.fp8_emulated, is_grouped
        self.multiple = FP8_MULTIPLES[self.recipe]
        self.block = _BLOCKS.get(self.recipe)
        self.scale_dtype = E8M0 if self.recipe == "mxfp8" else torch.float32
        self.dtypes = {"input": E4M3, "weight": E4M3, "gradient": E5M2 if config.fp8 == "hybrid" else E4M3}
        self.scalings = nn.ModuleDict()
        if self.recipe == "delayed":
            scalings = {role: DelayedScaling(config, max(groups, 1), dtype) for role, dtype in self.dtypes.items()}
            self.scalings = nn.ModuleDict(scalings)

    def forward(
        self, x_NI: Tensor, weight: Tensor, expert_N: Tensor | None = None, ends_E: Tensor | None = None
    ) -> Tensor:
        """Map [N, I] to [N, O], by a weight [O, I], or [E, O, I] for experts; in any dtype.

        For experts, `expert_N` has that of each row, sorted, and `ends_E` where the rows of each end, multiples of `multiple`.
        """
        sizes = {"tokens": len(x_NI), "input channels": weight.shape[-1], "output channels": weight.shape[-2]}
        for name, size in sizes.items():
            if size % self.multiple:
                raise DataError(
                    f"fp8_recipe {self.recipe!r}: got {size} {name}, expected a multiple of {self.multiple}. "
                    f"Change the batch size, the sequence length or the number of ranks, or choose a different recipe."
                )
        is_recorded = self.training and torch.is_grad_enabled()
        # Detached, not under `no_grad`: a plan does not see ops under it.
        inputs = self.casts(x_NI.detach(), "input", expert_N, is_recorded=is_recorded)
        weights = self.casts(weight.detach(), "weight", None, is_recorded=is_recorded)
        number = _numbers.get(self)
        if number is None:
            number = _numbers[self] = _next_number()
            _products[number] = self
        tensors = itertools.chain.from_iterable((*inputs, *weights))
        return _Product.apply(x_NI, weight, *tensors, expert_N, ends_E, number)  # type: ignore[no-untyped-call]

    def casts(self, tensor: Tensor, role: str, expert_N: Tensor | None, *, is_recorded: bool) -> tuple[Cast, Cast]:
        """Cast [N, C], or weights of linear layers, along the last dimension, and along the one before it.

        `role` is "input", "weight" or "gradient"; `expert_N` that of `forward`, None for weights. `is_recorded`: whether the
        histories of delayed scaling record it.
        """
        dtype = self.dtypes[role]
        if self.block is not None:
            rows = self.block if (role, self.recipe) == ("weight", "blockwise") else 1
            first = cast_blocks(tensor, rows, self.block, dtype, self.scale_dtype)
            return first, first if rows > 1 else cast_blocks(tensor, self.block, 1, dtype, self.scale_dtype)
        if expert_N is None:
            amax = torch.linalg.vector_norm(tensor, math.inf, dim=(-2, -1)).reshape(-1)
        else:
            amax_N = torch.linalg.vector_norm(tensor, math.inf, dim=1).float()
            amax = amax_N.new_zeros(self.groups).scatter_reduce(0, expert_N, amax_N, "amax")
        if self.recipe == "delayed":
            multiplier = self.scalings[role](amax, is_recorded=is_recorded)
        else:
            with torch.no_grad():  # so small that a plan keeps it rather than searching for the largest magnitude again
                multiplier = multiplier_of(amax, dtype)
        if expert_N is not None:
            multiplier = multiplier[expert_N]
        result = cast(tensor, multiplier.view(-1, *[1] * (tensor.dim() - 1)), dtype)
        return result, result

    def multiply(self, left: Cast, right: Cast, ends_E: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return `left @ right^T`, or for experts the products of their rows, or of their columns if both are matrices."""
        is_emulated = kernels_of(left.values) == "cpu" if self.emulated is None else self.emulated
        is_grouped = ends_E is not None and self.is_grouped
        if not is_emulated:
            # The cost model knows the kernels of the device that fake tensors represent.
            is_here = left.values.is_cuda and not is_fake_tensor(left.values)
            check_kernel(self.recipe, left.values.device if is_here else None, is_grouped=is_grouped)
        if is_grouped and is_emulated:
            return F.grouped_mm(left.whole(), right.whole().mT, offs=ends_E).to(dtype)
        if ends_E is not None and self.is_grouped:
            return grouped_product(left, right, ends_E, dtype)

        def one(left: Cast, right: Cast) -> Tensor:
            if is_emulated:
                return (left.whole() @ right.whole().mT).to(dtype)
            return one_product(self.recipe, left, right, dtype)

        if ends_E is None:
            return one(left, right)
        parts = [*enumerate(itertools.pairwise([0, *ends_E.tolist()]))]
        if right.values.dim() == 3:
            rows = [(left.part(-2, *part), Cast(right.values[e], right.scale[e])) for e, part in parts if range(*part)]
            return torch.cat([one(*sides) for sides in rows])
        products = left.values.new_zeros(len(parts), left.values.shape[0], right.values.shape[0], dtype=dtype)
        for expert, part in parts:
            if range(*part):
                products[expert] = one(left.part(-1, *part), right.part(-1, *part))
        return products


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        """`rest`: values and scales of four casts (input and weight, each for forward and for backward), and experts."""
        *tensors, expert_N, ends_E, number = rest
        ctx.save_for_backward(*tensors[2:4], *tensors[6:8], expert_N, ends_E)
        ctx.product, ctx.dtypes = _products[number], (x_NI.dtype, weight.dtype)
        return _products[number].multiply(Cast(*tensors[:2]), Cast(*tensors[4:6]), ends_E, x_NI.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        *tensors, expert_N, ends_E = ctx.saved_tensors
        product: Fp8Product = ctx.product
        along_channels, along_tokens = product.casts(grad_outputs[0], "gradient", expert_N, is_recorded=True)
        of_input, of_weight = None, None
        if ctx.needs_input_grad[0]:
            of_input = product.multiply(along_channels, Cast(*tensors[2:]).mT, ends_E, ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            of_weight = product.multiply(along_tokens.mT, Cast(*tensors[:2]).mT, ends_E, ctx.dtypes[1])
        return of_input, of_weight, *[None] * 11


@functools.cache
def check_kernel(recipe: str, device: torch.device | None, *, is_grouped: bool = False) -> None:
    """Check that PyTorch, and a CUDA device, have a kernel for a recipe; None: no local device."""
    least, most = _CAPABILITIES[recipe]
    version = None if device is None else torch.cuda.get_device_capability(device)
    problem = None
    if version is not None and not least <= version[0] + version[1] / 10 <= most:
        expected = f"of at least {least}" if most > 90 else f"from {least} to {most}"
        got = f"got a device of compute capability {version[0]}.{version[1]}"
        problem = f"{got}, which has no kernel for it, expected one {expected}"
    elif is_grouped and recipe in ("blockwise", "mxfp8"):
        problem = "got moe_grouped_gemm True, for which there is no kernel, expected False"
    if problem is not None:
        raise HardwareError(
            f"fp8_recipe {recipe!r}: {problem}. Choose a different recipe, or multiply in fp32: fp8_emulated (--fp8-emulated)."
        )


def one_product(recipe: str, left: Cast, right: Cast, dtype: torch.dtype) -> Tensor:
    """Return `left @ right^T`, [M, P]: written in bf16, as kernels for all recipes do, then of a dtype.

    Kernels read K as the last dimension of both, [M, K] and [P, K], for which backward copies bytes.
    """
    swizzle = _SWIZZLES.NO_SWIZZLE
    if recipe == "mxfp8":
        swizzle = _SWIZZLES.SWIZZLE_32_4_4
        scales = [_swizzled(side.scale) for side in (left, right)]
        types = [_TYPES.BlockWise1x32] * 2
    elif recipe == "blockwise":
        # A scale for each block of 128 x 128, or for one of each row; of those, the rows lie side by side.
        squares = [side.scale.shape[0] < side.values.shape[0] for side in (left, right)]
        types = [_TYPES.BlockWise128x128 if is_square else _TYPES.BlockWise1x128 for is_square in squares]
        scales = [
            F.pad(side.scale, (0, -side.scale.shape[1] % 4)).contiguous().mT
            if is_square
            else side.scale.mT.contiguous().mT
            for side, is_square in zip((left, right), squares, strict=True)
        ]
    else:
        scales = [_aligned(side.scale.reshape(-1)[:1]) for side in (left, right)]
        types = [_TYPES.TensorWise] * 2
    return F.scaled_mm(
        left.values.contiguous(),
        right.values.contiguous().mT,
        scales[0],
        types[0],
        scales[1],
        types[1],
        swizzle_a=swizzle,
        swizzle_b=swizzle,
        output_dtype=torch.bfloat16,
    ).to(dtype)


def grouped_product(left: Cast, right: Cast, ends_E: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the products of all experts, cast with a scale for each: [S, P] of [S, K] and [E, P, K].

    Or [E, M, P] of [M, S] and [P, S]. `ends_E`: where the rows of each expert end.
    """
    scales = []
    for side, length in ((left, left.values.shape[-2]), (right, right.values.shape[-2])):
        scale = side.scale
        if right.values.dim() == 2:
            # The scale of each expert's last row; without rows, the product is zero whatever its scale.
            scale = scale[0, (ends_E - 1).clamp(min=0)].unsqueeze(1).expand(-1, length).reshape(-1)
        else:
            scale = scale.squeeze(-1).expand(*scale.shape[:-2], length)
        scales.append(scale.contiguous())
    return F.scaled_grouped_mm(  # type: ignore[attr-defined]
        left.values.contiguous(),
        right.values.contiguous().mT,
        scales[0],
        _TYPES.RowWise,
        scales[1],
        _TYPES.RowWise,
        offs=ends_E,
        output_dtype=torch.bfloat16,
    ).to(dtype)


def _aligned(scale: Tensor) -> Tensor:
    """Return a scale at an address that kernels can read from: a multiple of 16."""
    return scale if scale.storage_offset() * scale.itemsize % 16 == 0 else scale.clone()


def _swizzled(scale: Tensor) -> Tensor:
    """Return scales [M, K / 32] in the order that Blackwell reads: tiles of 128 x 4, in each 32 rows of 4 x 4."""
    rows, columns = scale.shape
    padded = F.pad(scale.view(torch.uint8), (0, -columns % 4, 0, -rows % 128))
    tiles: Tensor = padded.unflatten(1, (-1, 4)).unflatten(0, (-1, 4, 32)).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(torch.float8_e8m0fnu)
