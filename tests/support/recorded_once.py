"""Profiles that are recorded once in a process, by what is recorded: for tests that are not about the recording."""

import hashlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import recollect

_PROFILES: dict[str, recollect.Profile] = {}


def recorded_once(model: nn.Module, batch: Any, **options: Any) -> recollect.Profile:
    """Return the profile of a step; of an equal model, batch and options, that of the first time.

    Args:
        model: one whose modules compute the same wherever classes, weights and what they print are the same.
        batch: tensors, and what prints as it is.
        options: of `recollect.record`; functions are those of a module.
    """
    key = _digest(model, batch, options)
    if key not in _PROFILES:
        _PROFILES[key] = recollect.record(model, batch, **options)
    return _PROFILES[key]


def _digest(model: nn.Module, batch: Any, options: dict[str, Any]) -> str:
    found = hashlib.sha256(repr((model, model.training)).encode())
    found.update(repr([(name, type(module)) for name, module in model.named_modules()]).encode())
    for leaf in (*model.parameters(), *model.buffers(), *tree_leaves(batch), *sorted(options.items())):
        found.update(repr((leaf.shape, leaf.dtype, leaf.requires_grad)).encode() if isinstance(leaf, Tensor) else b"")
        found.update(_content(leaf))
    return found.hexdigest()


def _content(leaf: Any) -> bytes:
    if isinstance(leaf, Tensor):
        return b"" if leaf.is_meta else leaf.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    if isinstance(leaf, tuple) and callable(leaf[1]):
        return f"{leaf[0]}={leaf[1].__module__}.{leaf[1].__qualname__}".encode()
    return repr(leaf).encode()
