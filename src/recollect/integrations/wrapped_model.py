"""The wrapper through which the processes of a training call its model, as `DistributedDataParallel`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

__all__ = ["in_wrapper"]


def in_wrapper(paths: Sequence[str] | None, wrapped: nn.Module, model: nn.Module) -> list[str] | None:
    """Return paths of a model's modules as paths in what wraps it.

    Args:
        paths: from the model; None for none.
        wrapped: the model, or what has it as a child.
        model: the model.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2))
        >>> in_wrapper(["0"], model, model), in_wrapper(["0"], nn.ModuleDict({"module": model}), model)
        (['0'], ['module.0'])
    """
    if paths is None or wrapped is model:
        return None if paths is None else list(paths)
    prefix = next(name for name, module in wrapped.named_modules() if module is model)
    return [f"{prefix}.{path}" if path else prefix for path in paths]
