"""A step of a run: its device, its optimizer and learning rate, and its memory.

The optimizer is AdamW with weight decay for matrices only.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import torch
from torch import nn

from recollect._torch_parallel import GradientBuckets
from recollect.byte_format import format_bytes
from recollect.errors import ConfigError, HardwareError
from recollect.lab.train.optim_flags import OptimFlags
from recollect.measuring.device_memory import memory_bytes
from recollect.measuring.host_memory import host_memory_bytes
from recollect.measuring.meter import measure_peak, storage_bytes
from recollect.recording.model_step import resident_tensors

_Result = TypeVar("_Result")
SMALLER: Final = "Choose a smaller model, or fewer tokens."


def resolve_device(name: str) -> torch.device:
    """Return the device of a `--device` flag; "auto" is CUDA if available, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise NotImplementedError("neither a CPU nor CUDA")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as problem:
        # PyTorch has no error class for this.
        here = ", ".join(["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))])
        raise HardwareError(
            f"--device {name}: cannot be used ({str(problem).splitlines()[0]}), expected auto or a device of this machine: "
            f"{here}. To plan for a different one, add --fake --hardware H100 (recollect plan, explain, frontier)."
        ) from None
    return device


def check_memory(
    model: nn.Module, batch_bytes: int, device: torch.device, settings: Mapping[str, object], advice: str
) -> None:
    """Check that a device may hold a model and its gradients: systems end a process that asks for too much without a word."""
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    there = memory_bytes(device) or host_memory_bytes()
    if 2 * nbytes + batch_bytes > there:
        need = f"the model's parameters take {format_bytes(nbytes)} and its gradients as much"
        need += f", the tokens {format_bytes(batch_bytes)}" if batch_bytes > nbytes else ""
        reason = f"{need}, and {device} has {format_bytes(there)}"
        raise ConfigError(settings=settings, reason=reason, advice=advice)


def build_optimizer(model: nn.Module, flags: OptimFlags) -> torch.optim.AdamW:
    """Return AdamW over `model`: matrices decay, vectors (biases, norm weights) do not; fused if the device supports it."""
    groups: list[dict[str, Any]] = []
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for decay, is_matrix in ((flags.weight_decay, True), (0.0, False)):
        # No kernel takes tensors on different meshes, or some on a mesh and some on none.
        by_mesh: dict[object, list[nn.Parameter]] = {}
        for parameter in trained:
            if (parameter.dim() >= 2) == is_matrix:
                by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        groups += [{"params": parameters, "weight_decay": decay} for parameters in by_mesh.values()]
    betas = (flags.beta1, flags.beta2)
    try:
        return torch.optim.AdamW(groups, lr=flags.learning_rate, betas=betas, eps=flags.adam_eps, fused=True)
    except RuntimeError:  # the only way to learn that the device has no fused kernel
        return torch.optim.AdamW(groups, lr=flags.learning_rate, betas=betas, eps=flags.adam_eps)


def learning_rate_at(step: int, flags: OptimFlags) -> float:
    """Return the learning rate of a step: linear warm-up, then decay to the lowest rate, which then stays."""
    if step < flags.warmup_steps:
        return flags.learning_rate * (step + 1) / flags.warmup_steps
    last = (flags.lr_decay_iters or flags.steps) - 1
    progress = min(1.0, (step - flags.warmup_steps) / max(1, last - flags.warmup_steps))
    lowest = flags.min_lr_fraction
    if flags.lr_decay_style == "constant":
        fraction = 1.0
    elif flags.lr_decay_style == "inverse-square-root":
        fraction = max(lowest, math.sqrt(max(flags.warmup_steps, 1) / (step + 1)))
    else:
        is_linear = flags.lr_decay_style == "linear"
        left = 1 - progress if is_linear else 0.5 * (1 + math.cos(math.pi * progress))
        fraction = lowest + (1 - lowest) * left
    return flags.learning_rate * fraction


def resident_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, batch: object = ()) -> int:
    """Return the bytes of parameters, gradients, buffers, optimizer state, batch and buckets in which gradients are reduced.

    Shared storages count once. Gradients that are parts of buckets must not be there.
    """
    tensors = resident_tensors(model, batch, optimizer)
    return storage_bytes(tensors) + sum(GradientBuckets(model, may_communicate=False).sizes_bytes)


def measure_step(
    step: Callable[[], _Result],
    *,
    device: torch.device,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    is_captured: bool = False,
) -> tuple[_Result, int]:
    """Run `step` and return its result and the peak in bytes of all that model, optimizer and step hold during it.

    On CUDA this reads the allocator's counter and costs nothing; for a captured step that of reserved memory, since a graph's
    pool counts as free. Elsewhere a meter measures the growth over what model and optimizer held before, which slows the step.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        result = step()
        read = torch.cuda.max_memory_reserved if is_captured else torch.cuda.max_memory_allocated
        return result, read(device)
    measurement = measure_peak(step, device=device, baseline_bytes=resident_bytes(model, optimizer))
    return measurement.result, measurement.peak_bytes
