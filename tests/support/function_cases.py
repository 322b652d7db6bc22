"""Custom autograd Functions as people write them, each in a unit's forward of (unit, hidden), [n, t, d] -> [n, t, d].

`RUN_AGAIN` names those of which the tape can run the forward again; `KEPT`, those of which it keeps what they make.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import custom_bwd, custom_fwd
from torch.autograd import Function
from torch.autograd.function import once_differentiable

Forward = Callable[[Any, Tensor], Tensor]
forwards: Counter[str] = Counter()
"""How often each Function's forward has run."""

TABLE = torch.linspace(-1, 1, 16)


@dataclass
class Quantized:
    """What is known of a packed weight: its shape and a scale for each row."""

    shape: tuple[int, int]
    scale: Tensor

    def unpacked(self, packed: Tensor) -> Tensor:
        levels = torch.stack([packed >> 4, packed & 15], -1).reshape(self.shape)
        return TABLE.to(packed.device)[levels.long()] * self.scale


class FourBitLinear(Function):
    """A frozen weight in 4 bits, unpacked in forward and again in backward; saves nothing but the packed weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, state: Quantized) -> Tensor:
        forwards["FourBitLinear"] += 1
        ctx.state = state
        ctx.save_for_backward(packed)
        return x @ state.unpacked(packed).t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (packed,) = ctx.saved_tensors
        return gradient @ ctx.state.unpacked(packed), None, None


class FusedCrossEntropy(Function):
    """Computes the gradient in forward, over the logits, chunk by chunk, and scales it in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        forwards["FusedCrossEntropy"] += 1
        gradient, losses = torch.empty_like(x), torch.empty(len(x))
        size = len(x) // 4
        for begin in range(0, len(x), size):
            rows = slice(begin, begin + size)
            logits = x[rows] @ weight.t()
            chances = logits.softmax(-1)
            losses[rows] = -chances.gather(1, labels[rows, None]).squeeze(1).log()
            chances[torch.arange(len(chances)), labels[rows]] -= 1
            torch.mm(chances, weight, out=gradient[rows])
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(losses)
        return losses.mean(), losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor, unused: Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(factor / len(gradient)), None, None


class Scan(Function):
    """A linear recurrence over time; saves the states of all times, and keeps one tensor on its context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, decay: Tensor) -> Tensor:
        forwards["Scan"] += 1
        states = torch.empty_like(x)
        state = torch.zeros_like(x[:, 0])
        rates = decay.sigmoid()
        for time in range(x.shape[1]):
            state = state * rates + x[:, time]
            states[:, time] = state
        ctx.rates = rates
        ctx.save_for_backward(states, decay)
        return states * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        states, decay = ctx.saved_tensors
        to_x, to_rates = torch.empty_like(gradient), torch.zeros_like(decay)
        state = torch.zeros_like(gradient[:, 0])
        for time in reversed(range(gradient.shape[1])):
            state = gradient[:, time] + state
            to_x[:, time] = state
            if time:
                to_rates += (state * states[:, time - 1]).sum(0)
            state = state * ctx.rates
        return to_x, to_rates * ctx.rates * (1 - ctx.rates)


class Kernel(Function):
    """Fills two empty buffers out of PyTorch's sight, as a Triton kernel does; saves one that it does not return."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        forwards["Kernel"] += 1
        output, slope = torch.empty_like(x), torch.empty_like(x)
        output.numpy()[...] = x.detach().sin().numpy()
        slope.numpy()[...] = x.detach().cos().numpy()
        ctx.save_for_backward(slope, output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        slope, output = ctx.saved_tensors
        return gradient * slope + 0 * output


class RandomKernel(Function):
    """Draws random numbers, and saves a view of what it drew."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, probability: float) -> Tensor:
        forwards["RandomKernel"] += 1
        mask = torch.rand(2, *x.shape) > probability
        ctx.save_for_backward(mask[1])
        return x * mask[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        return gradient * mask, None


class SetUp(Function):
    """The newer form, with the context set up apart, defaults, and gradients of gradients."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, power: int = 3) -> tuple[Tensor, Tensor]:
        forwards["SetUp"] += 1
        return x**power, x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.power = inputs
        ctx.save_for_backward(x, output[1])

    @staticmethod
    def backward(ctx: Any, one: Tensor, two: Tensor) -> Any:
        x, exponential = ctx.saved_tensors
        return one * ctx.power * x ** (ctx.power - 1) + two * exponential, None


class Amp(Function):
    """As in PyTorch's guide to autocast: computes in the type that autocast asks for."""

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        forwards["Amp"] += 1
        product = x @ weight
        ctx.save_for_backward(x, weight, product)
        return product.float().tanh()

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, product = ctx.saved_tensors
        inner = gradient * (1 - product.float().tanh() ** 2)
        return inner @ weight.t(), x.flatten(0, -2).t() @ inner.flatten(0, -2)


@dataclass(slots=True)
class Bundle:
    """Arguments in one: a tensor again, the group of ranks, perhaps something that changes with each call."""

    x: Tensor
    group: Any
    quantizer: Any


class Grouped(Function):
    """As linear layers of Megatron and Transformer Engine: told the group of its ranks, which it asks for their number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bundle: Bundle) -> Tensor:
        forwards["Grouped"] += 1
        assert bundle.x is x
        bundle.x = x
        ctx.save_for_backward(x, weight)
        ctx.num_ranks = 1 if bundle.group is None else bundle.group.size()
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight.t() * ctx.num_ranks, x.flatten(0, -2).t() @ gradient.flatten(0, -2), None


class AsksForGradients(Function):
    """What it saves depends on which arguments require grad, asked in two ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        forwards["AsksForGradients"] += 1
        inner = x * weight
        ctx.save_for_backward(inner.sin() if ctx.needs_input_grad[0] else None, x + 0 if weight.requires_grad else None)
        ctx.weight = weight
        return inner.cos()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        sine, x = ctx.saved_tensors
        if sine is None:
            return None, -(gradient * x).sum((0, 1))
        inner = -gradient * sine
        return inner * ctx.weight, (inner * x).sum((0, 1))


class Outer(Function):
    """Calls another Function, which is part of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        forwards["Outer"] += 1
        inner = Kernel.apply(x)
        ctx.save_for_backward(x, inner)
        return inner * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, inner = ctx.saved_tensors
        return 2 * gradient * x.cos() + 0 * inner


class Reversed(Function):
    """Returns a view of its argument, and makes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class WritesToState(Function):
    """Updates a running maximum, in sight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, state: Tensor) -> Tensor:
        forwards["WritesToState"] += 1
        state.copy_(torch.maximum(state * 0.5, x.abs().amax()))
        output = x / state
        ctx.save_for_backward(output)
        ctx.state = state.clone()
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (output,) = ctx.saved_tensors
        return gradient / ctx.state + 0 * output, None


class WritesUnseen(Function):
    """Writes its result over its argument, out of sight, and does not say so: Liger's cross entropy does it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        forwards["WritesUnseen"] += 1
        total = x.sum(-1, keepdim=True)
        values = x.detach().numpy()
        values *= 2
        ctx.save_for_backward(x.detach())
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (doubled,) = ctx.saved_tensors
        return gradient + 0.1 * doubled


class Counts(Function):
    """Depends on how often it has run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, state: dict[str, int]) -> Tensor:
        forwards["Counts"] += 1
        state["runs"] = state.get("runs", 0) + 1
        ctx.save_for_backward(x * state["runs"])
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (times,) = ctx.saved_tensors
        return gradient * 2 + 0 * times, None


class Chooses(Function):
    """Makes a choice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        forwards["Chooses"] += 1
        values, indices = x.sort(-1)
        ctx.save_for_backward(indices)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (indices,) = ctx.saved_tensors
        return torch.zeros_like(gradient).scatter(-1, indices, gradient)


class RunsAModule(Function):
    """Reentrant checkpointing, as many have written it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module, *parameters: Tensor) -> Tensor:
        forwards["RunsAModule"] += 1
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.module(x)
        parameters = list(ctx.module.parameters())
        to_x, *rest = torch.autograd.grad(output, [x, *parameters], gradient)
        return (to_x, None, *rest)


class Differentiates(Function):
    """Takes a gradient in forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        forwards["Differentiates"] += 1
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(inner.sin().sum(), inner)
        ctx.save_for_backward(slope)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (slope,) = ctx.saved_tensors
        return gradient * slope


early_apply = Kernel.apply


def four_bit(unit: Any, hidden: Tensor) -> Tensor:
    width = hidden.shape[-1]
    if not hasattr(unit, "packed"):
        torch.manual_seed(7)
        packed = torch.randint(0, 256, (width * width // 2,), dtype=torch.uint8)
        unit.register_buffer("packed", packed, persistent=False)
        unit.state = Quantized((width, width), torch.rand(width, 1) / math.sqrt(width))
    return FourBitLinear.apply(hidden.tanh(), unit.packed, unit.state).square()


def cross_entropy(unit: Any, hidden: Tensor) -> Tensor:
    rows = hidden.flatten(0, -2)
    loss, losses = FusedCrossEntropy.apply(rows, unit.weight, torch.arange(len(rows)) % len(unit.weight))
    return hidden.sin() * loss + losses.view(*hidden.shape[:-1], 1)


def set_up(unit: Any, hidden: Tensor) -> Tensor:
    power, exponential = SetUp.apply(hidden.sin())
    return power.exp() * exponential


def amp(unit: Any, hidden: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return Amp.apply(hidden.sin(), unit.weight).cos()


def grouped(unit: Any, hidden: Tensor, function: Any = Grouped, quantizer: Any = None) -> Tensor:
    group = torch.distributed.ProcessGroup(0, 1) if torch.distributed.is_available() else None
    output: Tensor = function.apply(hidden, unit.weight, Bundle(hidden, group, quantizer))
    return output.tanh()


def written_later(unit: Any, hidden: Tensor) -> Tensor:
    """What a Function made is written to in place, in parts and as a whole."""
    output = Scan.apply(hidden.sigmoid(), unit.weight[0])
    powers = output.exp()
    output[:, 1:].mul_(2)
    return powers.sin() * output.add_(1)


def writes_to_state(unit: Any, hidden: Tensor) -> Tensor:
    if not hasattr(unit, "maximum"):
        unit.register_buffer("maximum", torch.ones(()))
    return WritesToState.apply(hidden.sin(), unit.maximum)


def counts(unit: Any, hidden: Tensor) -> Tensor:
    return Counts.apply(hidden.sin(), {}).exp()


RUN_AGAIN: dict[str, Forward] = {
    "four_bit": four_bit,
    "cross_entropy": cross_entropy,
    "scan": lambda unit, hidden: Scan.apply(hidden.sigmoid(), unit.weight[0]).sin(),
    "kernel": lambda unit, hidden: early_apply(Kernel.apply(hidden * 2) + hidden).square(),
    "random_kernel": lambda unit, hidden: RandomKernel.apply(hidden.sin(), 0.3) * RandomKernel.apply(hidden.cos(), 0.6),
    "set_up": set_up,
    "amp": amp,
    "grouped": grouped,
    "asks": lambda unit, hidden: (
        AsksForGradients.apply(hidden * 2, unit.weight[0])
        + AsksForGradients.apply(hidden.detach() * 2, unit.inner.bias)
    ),
    "nested": lambda unit, hidden: Outer.apply(hidden.tanh()).sin(),
    "written_later": written_later,
}
KEPT: dict[str, Forward] = {
    "writes_to_state": writes_to_state,
    "writes_unseen": lambda unit, hidden: WritesUnseen.apply(hidden * 2).sin() * hidden,
    "chooses": lambda unit, hidden: Chooses.apply(hidden.sin()).exp(),
    "runs_a_module": lambda unit, hidden: RunsAModule.apply(hidden.sin(), unit.inner, *unit.inner.parameters()).exp(),
    "differentiates": lambda unit, hidden: Differentiates.apply(hidden.exp()).square(),
    "passes_on": lambda unit, hidden: Reversed.apply(hidden.sin()).exp() + Reversed.apply(hidden),
}
