"""Has Python's and NumPy's generators of the whole process give a region the same numbers both times."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["HostDraws"]


class HostDraws:
    """What one call of a region draws from `random` and, where the program uses it, from `numpy.random`."""

    def __init__(self) -> None:
        self._states = _states()

    def forward_has_run(self) -> None:
        """Let go of the states if nothing was drawn; call after the first run."""
        if _content(_states()) == _content(self._states):
            self._states = None, None

    @contextmanager
    def second(self) -> Iterator[None]:
        """Have the same numbers drawn again, and leave the generators as they are."""
        if self._states[0] is None:
            yield
            return
        present = _states()
        _set(self._states)
        try:
            yield
        finally:
            _set(present)


def _states() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy.random")
    return random.getstate(), None if numpy is None else numpy.get_state()


def _content(states: tuple[Any, Any]) -> tuple[Any, ...]:
    python, numpy = states
    # The second entry of NumPy's is an array, which does not compare.
    return python, None if numpy is None else (numpy[1].tobytes(), *numpy[2:])


def _set(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy.random"].set_state(states[1])
