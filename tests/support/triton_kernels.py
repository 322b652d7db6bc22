"""Triton kernels and an op made of one, for tests; importing this needs Triton.

Annotations are objects here, not strings: Triton and `torch.library` read them.
"""

import torch
import triton
import triton.language as tl

from library_ops import half_square_backward, save_half_square

_BLOCK = 1024


@triton.jit
def _half_square_kernel(x_pointer, out_pointer, num_elements, block: tl.constexpr):
    offsets = tl.program_id(0) * block + tl.arange(0, block)
    mask = offsets < num_elements
    x = tl.load(x_pointer + offsets, mask=mask)
    tl.store(out_pointer + offsets, x * x * 0.5 + x, mask=mask)


def half_square_into(x: torch.Tensor, out: torch.Tensor) -> None:
    """Write x^2 / 2 + x to a buffer, which may be x itself, out of PyTorch's sight."""
    num_elements = x.numel()
    _half_square_kernel[(triton.cdiv(num_elements, _BLOCK),)](x, out, num_elements, block=_BLOCK)


@torch.library.triton_op("recollect_tests::half_square_by_triton", mutates_args={})
def half_square_by_triton(x: torch.Tensor) -> torch.Tensor:
    """x^2 / 2 + x as an op that PyTorch knows, with the kernel inside in its sight too."""
    out = torch.empty_like(x)
    num_elements = x.numel()
    grid = (triton.cdiv(num_elements, 1024),)
    torch.library.wrap_triton(_half_square_kernel)[grid](x, out, num_elements, block=1024)
    return out


half_square_by_triton.register_autograd(half_square_backward, setup_context=save_half_square)
