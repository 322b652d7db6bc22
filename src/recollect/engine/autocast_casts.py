"""Tells which calls share the casts that autocast makes.

Autocast keeps the casts of leaves until its block ends. Readers of a kept cast add up their gradients in the lower
precision, in all calls of the block together.
"""

import functools
from typing import Any

import torch
from torch import nn

from recollect._torch_private import any_autocast_is_enabled


def keeps_casts() -> bool:
    return any_autocast_is_enabled() and torch.is_autocast_cache_enabled()


def kept_casts(device: torch.device) -> Any:
    """Return an object that stands for the casts that autocast keeps: the same object until it lets go of them."""
    probe = _probe(device)
    with torch.enable_grad():
        product: Any = torch.mm(probe, probe)
    return product.grad_fn.next_functions[0][0]


@functools.cache
def _probe(device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.zeros(1, 1, device=device, dtype=torch.float32))
