"""Switches off the cache of keys and values that models of Hugging Face return, which training does not read."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["CacheOff"]


class CacheOff:
    """Has a model make no cache, until it is removed.

    Args:
        model: whose configurations have `use_cache`.

    Example:
        >>> from types import SimpleNamespace
        >>> model = nn.Linear(2, 2)
        >>> model.config = SimpleNamespace(use_cache=True)
        >>> off = CacheOff(model)
        >>> model.config.use_cache
        False
        >>> off.remove()
        >>> model.config.use_cache
        True
    """

    def __init__(self, model: nn.Module) -> None:
        # Models within models have configurations of their own, or share one.
        found: dict[int, Any] = {id(c): c for c in (getattr(module, "config", None) for module in model.modules())}
        self._configs = [config for config in found.values() if getattr(config, "use_cache", None) is True]
        for config in self._configs:
            config.use_cache = False

    def remove(self) -> None:
        """Switch it on again where it was."""
        for config in self._configs:
            config.use_cache = True
        self._configs = []
