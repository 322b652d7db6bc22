"""Warn at the line of the user's program that led to the warning, however deep in recollect it arises."""

import inspect
import warnings

# PyTorch calls a plan's modules, and the standard library calls its context managers.
_NOT_USERS = frozenset({"recollect", "torch", "contextlib"})


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line outside of recollect and PyTorch; at the outermost one if all are inside.

    Python's own `skip_file_prefixes` needs Python 3.12.
    """
    level, frame = 1, inspect.currentframe()
    while frame and frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_USERS:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
