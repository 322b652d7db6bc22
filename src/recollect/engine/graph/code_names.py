"""Finds the facts that a model's code depends on, by the names it uses: Dynamo's guards do not see all of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any, Final

from torch import nn

from recollect.programs.cut import UntraceableError

# Treated by a trace as constant, without a guard.
_UNGUARDED: Final = frozenset({"is_leaf", "_base"})


def check_code(module: nn.Module) -> None:
    """Check that a unit's code does not depend on anything that may change between calls, unseen by guards.

    Raises:
        UntraceableError: it does.
    """
    for kind in {type(part) for part in module.modules()}:
        if asked := _UNGUARDED & names_in(kind.forward, kind):
            raise UntraceableError(f"code of {kind.__name__} uses {min(asked)}, which a trace would take for constant")


def names_in(function: Any, kind: type | None = None) -> set[str]:
    """Return the names used by a function's code, and by functions that it calls by name or holds.

    Those of PyTorch are left out. With a class, methods that it names are looked up there, and those of other packages are left
    out, too.
    """
    found: set[str] = set()
    pending, seen = [function], set()
    while pending:
        one = pending.pop()
        if isinstance(one, FunctionType) and one not in seen and _is_followed(one, kind):
            seen.add(one)
            names = {name for code in _codes_in(one.__code__) for name in code.co_names}
            found |= names
            reached = inspect.getclosurevars(one)
            pending += [*reached.globals.values(), *reached.nonlocals.values()]
            pending += [inspect.getattr_static(kind, name, None) for name in names] if kind is not None else []
    return found


def _is_followed(function: FunctionType, kind: type | None) -> bool:
    package = function.__module__.partition(".")[0]
    return package != "torch" and (kind is None or package == kind.__module__.partition(".")[0])


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield the code, and that of lambdas and comprehensions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_in(constant)
