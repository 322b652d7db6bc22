"""AdamW with weight decay for matrices only, and its learning rate schedule."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from recollect.lab.train.config import OptimFlags


def build_optimizer(model: nn.Module, flags: OptimFlags) -> torch.optim.AdamW:
    """Return AdamW over `model`: matrices decay, vectors (biases, norm weights) do not; fused if the device supports it."""
    groups: list[dict[str, Any]] = []
    for decay, is_wanted in ((flags.weight_decay, _is_matrix), (0.0, _is_vector)):
        # No kernel takes tensors that are spread over different meshes, or over one and over none.
        by_mesh: dict[object, list[nn.Parameter]] = {}
        for parameter in filter(is_wanted, model.parameters()):
            by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        groups += [{"params": parameters, "weight_decay": decay} for parameters in by_mesh.values()]
    betas = (flags.beta1, flags.beta2)
    try:
        return torch.optim.AdamW(groups, lr=flags.learning_rate, betas=betas, eps=flags.adam_eps, fused=True)
    except RuntimeError:  # the only way to learn that the device has no fused kernel
        return torch.optim.AdamW(groups, lr=flags.learning_rate, betas=betas, eps=flags.adam_eps)


def parameter_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters as the optimizer of one process numbers them."""
    named = list(model.named_parameters())
    return [name for is_wanted in (_is_matrix, _is_vector) for name, parameter in named if is_wanted(parameter)]


def _is_matrix(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad and parameter.dim() >= 2


def _is_vector(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad and parameter.dim() < 2


def learning_rate_at(step: int, flags: OptimFlags) -> float:
    """Return the learning rate of a step: linear warm-up, then decay to the lowest rate, which then stays.

    Args:
        step: optimizer steps completed before.
        flags: highest rate, number of steps, warm-up, shape and end of the decay.

    Returns:
        The rate, at most `flags.learning_rate`.

    Example:
        >>> flags = OptimFlags(steps=11, warmup_steps=2, learning_rate=1.0, min_lr_fraction=0.1)
        >>> [round(learning_rate_at(step, flags), 2) for step in (0, 1, 2, 6, 10)]
        [0.5, 1.0, 1.0, 0.55, 0.1]
    """
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


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the learning rate of all groups."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
