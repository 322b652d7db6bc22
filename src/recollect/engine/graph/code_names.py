"""Finds the facts that a model's code depends on, by the names it uses: Dynamo's guards do not see all of them."""

import inspect
import sys
from collections.abc import Iterator
from enum import Enum
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

import torch
from torch import nn

from recollect.engine.function_run import is_plain_value
from recollect.programs.cut import UntraceableError

# Treated by a trace as constant, without a guard.
_UNGUARDED: Final = frozenset({"is_leaf", "_base", "output_nr", "retains_grad", "__dict__", "vars"})

# Packages whose modules and classes have no data that models would change.
_WITHOUT_STATE: Final = sys.stdlib_module_names | {"numpy", "torch", "triton"}


def check_code(module: nn.Module) -> None:
    """Raise `UntraceableError` if a unit's code depends on anything that may change between calls, unseen by guards."""
    kinds = {type(part) for part in module.modules()}
    used = [(f"code of {kind.__name__}", names_in(kind.forward, kind)) for kind in kinds]
    for part in module.modules():
        for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values()):
            used.append((f"a hook on {type(part).__name__}", names_in(getattr(hook, "__func__", hook))))
    for what, names in used:
        if asked := _UNGUARDED & names:
            raise UntraceableError(f"{what} uses {min(asked)}, which a trace would take for constant")


def names_in(function: Any, kind: type | None = None) -> set[str]:
    """Return the names used by a function's code, and by functions that it calls by name or holds.

    Those of PyTorch are left out. With a class, methods that it names are looked up there, and those of other packages are left
    out, too.
    """
    return {name for names, _ in _followed(function, kind) for name in names}


def state_in(function: Any) -> set[str]:
    """Return the names of what such code reads and may change: global or closed over, or data of classes and modules."""
    found: set[str] = set()
    for names, reached in _followed(function, None):
        # Nobody assigns to numbers that are closed over.
        closed_over = {name: value for name, value in reached.nonlocals.items() if not is_plain_value(value)}
        for name, value in {**reached.globals, **closed_over}.items():
            if not isinstance(value, (type, ModuleType)):
                found |= {name} if _may_change(value) else set()
            elif (getattr(value, "__module__", "") or value.__name__).partition(".")[0] not in _WITHOUT_STATE:
                found |= {one for one in names if _may_change(inspect.getattr_static(value, one, None))}
    return found


def _may_change(value: Any) -> bool:
    """Whether a value is neither constant, nor what methods and properties are kept as."""
    is_kept_so = callable(value) or hasattr(type(value), "__get__")
    return not is_kept_so and not isinstance(value, (ModuleType, torch.dtype, torch.device, Enum, type(None)))


def _followed(function: Any, kind: type | None) -> Iterator[tuple[set[str], inspect.ClosureVars]]:
    """Yield the names in each function's code, and the values of those that are global or closed over."""
    pending, seen = [function], set()
    while pending:
        one = pending.pop()
        if isinstance(one, FunctionType) and one not in seen and _is_followed(one, kind):
            seen.add(one)
            names = {name for code in _codes_in(one.__code__) for name in code.co_names}
            reached = inspect.getclosurevars(one)
            yield names, reached
            pending += [*reached.globals.values(), *reached.nonlocals.values()]
            pending += [inspect.getattr_static(kind, name, None) for name in names] if kind is not None else []


def _is_followed(function: FunctionType, kind: type | None) -> bool:
    package = (function.__module__ or "").partition(".")[0]  # None for functions that `exec` has made of a text.
    return package != "torch" and (kind is None or package == kind.__module__.partition(".")[0])


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield the code, and that of lambdas and comprehensions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_in(constant)
