"""Finds the module of a unit, and the modules below it whose `forward` may be replaced."""

from __future__ import annotations

import torch
from torch import nn

from recollect._torch_private import is_compiled_module
from recollect.errors import UnknownNameError

__all__ = ["plain_submodules", "unit_module"]


def unit_module(model: nn.Module, path: str) -> nn.Module:
    """Return the module at a path.

    Raises:
        UnknownNameError: there is none.

    Example:
        >>> unit_module(nn.Sequential(nn.ReLU()), "0")
        ReLU()
    """
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    if path not in modules:
        wrapped = next((name for name in modules if _without_wrappers(name) == _without_wrappers(path)), None)
        reason = (
            f"It has {wrapped!r}: torch.compile(module) wraps a module, while module.compile() keeps names."
            if wrapped
            else ""
        )
        raise UnknownNameError(kind="unit", name=path, where=type(model).__name__, known=list(modules), reason=reason)
    return modules[path]


def _without_wrappers(path: str) -> list[str]:
    return [part for part in path.split(".") if part != "_orig_mod"]


def plain_submodules(unit: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """Return the modules below a unit whose `forward` may be wrapped, with their paths in the unit.

    Scripted and compiled modules are left out, with everything inside them.
    """
    found: list[tuple[str, nn.Module]] = []
    for name, child in unit.named_children():
        if isinstance(child, torch.jit.ScriptModule) or is_compiled_module(child):
            continue
        path = f"{prefix}.{name}" if prefix else name
        found += [(path, child), *plain_submodules(child, path)]
    return found
