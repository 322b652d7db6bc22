"""Plans on one model in turns: each is put on for its own steps and taken off again, at no cost worth a mention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from recollect.engine.placed_forward import Applied

__all__ = ["OnTape"]


class OnTape:
    """A plan or policy that recollect has applied; it remembers what it learnt in earlier steps, as in training.

    Args:
        applied: what is on the model now; it is taken off at once.

    Example:
        >>> import recollect
        >>> from recollect.lab.models.architectures import llama_config
        >>> from recollect.lab.models.gpt import GPTModel
        >>> model = GPTModel(llama_config(num_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=64))
        >>> plan = recollect.Plan({"decoder.layers.0": recollect.UnitPlan({"mlp.activation_func.silu": "recompute"})})
        >>> turns = [OnTape(recollect.apply(model, plan)) for _ in range(2)]
        >>> with turns[0].on():
        ...     pass
    """

    def __init__(self, applied: Applied) -> None:
        self._applied = applied
        self._absence = ExitStack()
        self._absence.enter_context(applied.suspended())

    @contextmanager
    def on(self) -> Iterator[None]:
        """Put it back for the length of a with-block."""
        self._absence.close()
        try:
            yield
        finally:
            self._absence.enter_context(self._applied.suspended())
