"""Ops of `torch.library.custom_op`, as extensions define theirs, on any device.

Annotations are objects here, not strings: `torch.library` reads them.
"""

import torch


@torch.library.custom_op("recollect_tests::half_square", mutates_args=())
def half_square(x: torch.Tensor) -> torch.Tensor:
    """x^2 / 2 + x."""
    return x * x * 0.5 + x


@half_square.register_fake
def _half_square_fake(x):
    return torch.empty_like(x)


def save_half_square(ctx, inputs, output):
    """Save for `half_square_backward`."""
    (x,) = inputs
    ctx.save_for_backward(x, output)


def half_square_backward(ctx, gradient):
    """The gradient of x^2 / 2 + x, which reads the result as well, and does not need it."""
    x, output = ctx.saved_tensors
    return gradient * (x + 1) + 0 * output


half_square.register_autograd(half_square_backward, setup_context=save_half_square)


SCALE = [1.0]


@torch.library.custom_op("recollect_tests::scaled_sine", mutates_args=())
def scaled_sine(x: torch.Tensor) -> torch.Tensor:
    """sin(x), whose gradient is scaled by what is global."""
    return x.sin()


scaled_sine.register_fake(torch.empty_like)
scaled_sine.register_autograd(lambda ctx, gradient: gradient * SCALE[0])


@torch.library.custom_op("recollect_tests::sines", mutates_args=())
def sines(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """sin(x) of each tensor."""
    return [tensor.sin() for tensor in tensors]


sines.register_fake(lambda tensors: [torch.empty_like(tensor) for tensor in tensors])
sines.register_autograd(
    lambda ctx, gradients: [gradient * x.cos() for gradient, x in zip(gradients, ctx.saved_tensors, strict=True)],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[0]),
)


@torch.library.custom_op("recollect_tests::drop", mutates_args=())
def drop(x: torch.Tensor, probability: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Dropout and its mask; the op reads the generator and does not say so, as flash-attn's does not."""
    mask = torch.rand_like(x) >= probability
    return x * mask, mask


@drop.register_fake
def _drop_fake(x, probability):
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def _setup_drop(ctx, inputs, output):
    ctx.save_for_backward(output[1])


def _drop_backward(ctx, gradient, gradient_of_mask):
    (mask,) = ctx.saved_tensors
    return gradient * mask, None


drop.register_autograd(_drop_backward, setup_context=_setup_drop)


@torch.library.custom_op("recollect_tests::double_", mutates_args={"x"})
def double_(x: torch.Tensor) -> None:
    x.mul_(2)
