"""Keep errors from holding objects of the functions that they passed through: a model, its gradients, an optimizer."""

import functools
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

from recollect.errors import RecollectError

P = ParamSpec("P")
T = TypeVar("T")

_HERE = str(Path(__file__).parent)


def lets_go(function: Callable[P, T]) -> Callable[P, T]:
    """Make the errors of a function hold none of recollect's local variables; those of the user's own functions stay.

    Otherwise a kept error, as in a notebook or debugger, would keep the model alive.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            _clear(error)
            raise
        finally:
            del args, kwargs

    return call


def _clear(error: BaseException) -> None:
    """Forget the local variables of recollect's functions that an error, and those behind it, have left."""
    pending, seen = [error], set[int]()
    while pending:
        found = pending.pop()
        seen.add(id(found))
        is_own = False
        for frame, _ in traceback.walk_tb(found.__traceback__):
            is_own = frame.f_code.co_filename.startswith(_HERE)
            if is_own:
                with suppress(RuntimeError):  # It is still running.
                    frame.clear()
        if is_own and isinstance(found, RecollectError):
            found.__traceback__ = None  # A closure's frame holds more than its local variables.
        pending += [e for e in (found.__cause__, found.__context__) if e is not None and id(e) not in seen]
