"""Names that a package imports on first use: importing it is quick and does not need their dependencies."""

import ast
import difflib
import importlib
import pkgutil
import sys
from collections.abc import Callable
from typing import Any


def lazy_names(package: str) -> tuple[dict[str, str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return the module of each name that a package's `__init__.pyi` imports, and the package's `__getattr__` and `__dir__`."""
    stub = ast.parse(pkgutil.get_data(package, "__init__.pyi") or b"")
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: node.module or "" for node in imports for alias in node.names}

    def get(name: str) -> Any:
        if name not in homes:
            near = difflib.get_close_matches(name, homes, n=1)
            advice = f"; did you mean {near[0]!r}?" if near and not name.startswith("_") else ""
            raise AttributeError(f"module {package!r} has no attribute {name!r}{advice}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return homes, get, lambda: sorted({*vars(sys.modules[package]), *homes})
