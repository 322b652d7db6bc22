"""Puts a line into a function of recollect, as a fault would."""

from __future__ import annotations
import __future__

import ast
import inspect
import sys
import textwrap
from typing import Any

import pytest


def inject(patch: pytest.MonkeyPatch, owner: Any, name: str, after: str, line: str) -> int:
    """Put a line after the one of a function that contains a text; return the line's number in its file."""
    lines, first = inspect.getsourcelines(inspect.unwrap(vars(owner)[name]))
    (position,) = (index for index, one in enumerate(lines) if after in one)
    beside = lines[position + lines[position].rstrip().endswith(":")]
    indent = beside[: -len(beside.lstrip())]
    text = textwrap.dedent("".join([*lines[: position + 1], f"{indent}{line}\n", *lines[position + 1 :]]))
    file = inspect.getsourcefile(inspect.unwrap(vars(owner)[name]))
    assert file is not None
    tree = ast.increment_lineno(ast.parse(text), first - 1)
    own: dict[str, Any] = {}
    module = sys.modules[owner.__name__ if inspect.ismodule(owner) else owner.__module__]
    exec(compile(tree, file, "exec", __future__.annotations.compiler_flag), vars(module), own)
    patch.setattr(owner, name, own[name])
    return first + position + 1
