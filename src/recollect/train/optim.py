"""AdamW with decay for matrices only, and the learning rate of each step."""

from __future__ import annotations

import math

import torch
from torch import nn

from recollect.train.config import OptimFlags


def build_optimizer(model: nn.Module, flags: OptimFlags) -> torch.optim.AdamW:
    """Return AdamW over `model`: matrices decay, vectors (norm weights) do not; fused where this device has it."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": flags.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    betas = (flags.beta1, flags.beta2)
    try:
        return torch.optim.AdamW(groups, lr=flags.learning_rate, betas=betas, fused=True)
    except RuntimeError:  # torch says here, and only here, that the device has no fused kernel
        return torch.optim.AdamW(groups, lr=flags.learning_rate, betas=betas)


def learning_rate_at(step: int, flags: OptimFlags) -> float:
    """Return the learning rate of a step: a linear rise, then half a cosine down to the lowest at the last step.

    Args:
        step: optimizer steps done before.
        flags: highest rate, number of steps, warm-up and end.

    Returns:
        The rate; it is never above `flags.learning_rate`.

    Example:
        >>> flags = OptimFlags(steps=11, warmup_steps=2, learning_rate=1.0, min_lr_fraction=0.1)
        >>> [round(learning_rate_at(step, flags), 2) for step in (0, 1, 2, 6, 10)]
        [0.5, 1.0, 1.0, 0.55, 0.1]
    """
    if step < flags.warmup_steps:
        return flags.learning_rate * (step + 1) / flags.warmup_steps
    progress = (step - flags.warmup_steps) / max(1, flags.steps - 1 - flags.warmup_steps)
    fraction = flags.min_lr_fraction + (1 - flags.min_lr_fraction) * 0.5 * (1 + math.cos(math.pi * progress))
    return flags.learning_rate * fraction


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the learning rate of all groups."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
