"""PyTorch's kernels for products in 8 bits, and which devices have them.

Shape legend: M, K rows and summed channels of the left matrix   P rows of the right one   E experts   S rows of all experts
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from recollect.errors import HardwareError
from recollect.lab.models.fp8_casts import Cast

_TYPES, _SWIZZLES = F.ScalingType, F.SwizzleType
# The compute capabilities with kernels, first and last.
_CAPABILITIES = {"delayed": (8.9, 99.0), "tensorwise": (8.9, 99.0), "blockwise": (9.0, 9.9), "mxfp8": (10.0, 99.0)}


@functools.cache
def check_kernel(recipe: str, device: torch.device | None, *, is_grouped: bool = False) -> None:
    """Check that PyTorch has a kernel for a recipe, and a CUDA device as well; None: a device that is not here.

    Raises:
        HardwareError: one of them has none.
    """
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
            f"fp8_recipe {recipe!r}: {problem}. Choose another recipe, or multiply in fp32: fp8_emulated (--fp8-emulated)."
        )


def one_product(recipe: str, left: Cast, right: Cast, dtype: torch.dtype) -> Tensor:
    """Return `left @ right^T`, [M, P]: written in bf16, as kernels for all recipes do, then of a dtype.

    Args:
        recipe: how they were cast.
        left: [M, K].
        right: [P, K]; kernels read K as the last dimension of both, for which backward copies bytes.
        dtype: of the result.
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
            F.pad(side.scale, (0, -side.scale.shape[1] % 4)).mT if is_square else side.scale.mT.contiguous().mT
            for side, is_square in zip((left, right), squares, strict=True)
        ]
    else:
        scales = [side.scale.reshape(-1)[:1] for side in (left, right)]
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
    """Return the products of all experts, cast with a scale for each.

    Args:
        left: [S, K], or [M, S].
        right: [E, P, K], or [P, S].
        ends_E: where the rows of each expert end.
        dtype: of the result.

    Returns:
        [S, P], or [E, M, P].
    """
    scales = []
    for side, length in ((left, left.values.shape[-2]), (right, right.values.shape[-2])):
        scale = side.scale
        if right.values.dim() == 2:
            # Of each expert's last row; of one without rows, the product is zero whatever its scale.
            scale = scale[0, (ends_E - 1).clamp(min=0)].unsqueeze(1).expand(-1, length).reshape(-1)
        else:
            scale = scale.squeeze(-1).expand(*scale.shape[:-2], length)
        scales.append(scale.contiguous())
    out_bf16: Tensor = F.scaled_grouped_mm(  # type: ignore[attr-defined]
        left.values.contiguous(),
        right.values.contiguous().mT,
        scales[0],
        _TYPES.RowWise,
        scales[1],
        _TYPES.RowWise,
        offs=ends_E,
        output_dtype=torch.bfloat16,
    )
    return out_bf16.to(dtype)


def _swizzled(scale: Tensor) -> Tensor:
    """Return scales [M, K / 32] in the order that Blackwell reads: tiles of 128 x 4, in each 32 rows of 4 x 4."""
    rows, columns = scale.shape
    padded = F.pad(scale.view(torch.uint8), (0, -columns % 4, 0, -rows % 128))
    tiles: Tensor = padded.unflatten(1, (-1, 4)).unflatten(0, (-1, 4, 32)).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(torch.float8_e8m0fnu)
