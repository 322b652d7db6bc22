"""Fits PyTorch training into the memory you have, at the least slowdown possible, and proves it.

The names in `__init__.pyi` are the public API. They are imported on first use, so that `import recollect` is quick and the
planner works where PyTorch is not installed.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from typing import Any

__version__ = "0.1.0"

_STUB = pkgutil.get_data(__name__, "__init__.pyi") or b""
_HOME_OF_NAME = {
    alias.name: node.module or ""
    for node in ast.parse(_STUB).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}

__all__ = sorted(_HOME_OF_NAME)  # noqa: PLE0605 - a list of texts all the same


def __getattr__(name: str) -> Any:
    home = _HOME_OF_NAME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
