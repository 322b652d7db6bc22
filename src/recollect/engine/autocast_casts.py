"""Tells which calls share the casts that autocast makes.

Autocast keeps the casts of leaves until its block ends. Readers of a kept cast add up their gradients in the lower
precision, in all calls of the block together.
"""

import functools
from typing import Any

import torch
from torch import nn


def keeps_casts() -> bool:
    """Whether casts that are made now are kept for the code that follows: in a block of autocast, where it may be off."""
    level = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return level > 1 and torch.is_autocast_cache_enabled()


def kept_casts(device: torch.device) -> Any:
    """Return an object that stands for the casts that autocast keeps: the same object until it lets go of them."""
    probe = _probe(device)
    with torch.enable_grad():
        product: Any = torch.mm(probe, probe)
    return product.grad_fn.next_functions[0][0]


@functools.cache
def _probe(device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.zeros(0, 0, device=device, dtype=torch.float32))
