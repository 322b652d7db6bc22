"""Ways to recompute that can be switched on and off on one model, at negligible cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

from torch import nn

from recollect.lab.bench.switchable import SwitchablePlan

__all__ = ["Forward", "Forwards", "HuggingFace", "Nothing", "SwitchablePlan", "Recompute", "Replaced", "Together"]

Forward = Callable[..., Any]
Forwards = Mapping[nn.Module, Forward]


class Recompute(Protocol):
    """A way to recompute that can be switched on and off."""

    def on(self) -> AbstractContextManager[None]:
        """Activate it in a with-block."""
        ...


class Nothing:
    """The unmodified model."""

    def on(self) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()


class Replaced:
    """Modules with other forwards."""

    def __init__(self, forwards: Forwards) -> None:
        self._forwards = forwards

    @contextmanager
    def on(self) -> Iterator[None]:
        """Replace the forwards in a with-block."""
        before = {module: vars(module).get("forward") for module in self._forwards}
        for module, forward in self._forwards.items():
            vars(module)["forward"] = forward
        try:
            yield
        finally:
            for module, forward in before.items():
                if forward is None:
                    del vars(module)["forward"]
                else:
                    vars(module)["forward"] = forward


class HuggingFace:
    """Hugging Face's own activation checkpointing, of every layer or every nth.

    The switch has a new name since transformers 5.23.
    """

    def __init__(self, model: Any, every_n_layers: int) -> None:
        self._model = model
        self._every_n_layers = every_n_layers
        self._kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"

    @classmethod
    def is_switch_of(cls, model: Any) -> bool:
        """Return whether a model has this switch."""
        return hasattr(model, "activation_checkpointing_enable") or hasattr(model, "gradient_checkpointing_enable")

    @contextmanager
    def on(self) -> Iterator[None]:
        """Switch it on in a with-block."""
        getattr(self._model, f"{self._kind}_checkpointing_enable")(every_n_layers=self._every_n_layers)
        try:
            yield
        finally:
            getattr(self._model, f"{self._kind}_checkpointing_disable")()
            self._model.disable_input_require_grads()  # the switch above leaves its hook on the embedding


class Together:
    """Several ways at once."""

    def __init__(self, parts: Sequence[Recompute]) -> None:
        self._parts = list(parts)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Activate all of them in a with-block, the last one outermost."""
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.on())
            yield
