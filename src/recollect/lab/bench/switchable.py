"""A plan that is on a model only now and then, as settings take turns. Needs nothing of the flags and layouts of the lab."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from recollect.engine.placed_forward import Applied


class SwitchablePlan:
    """An applied plan or policy that is active only in `on()`, and keeps what it learnt in earlier steps, as in training."""

    def __init__(self, applied: Applied) -> None:
        self._applied = applied
        self._suspension = ExitStack()
        self._suspension.enter_context(applied.suspended())

    @contextmanager
    def on(self) -> Iterator[None]:
        self._suspension.close()
        try:
            yield
        finally:
            self._suspension.enter_context(self._applied.suspended())
