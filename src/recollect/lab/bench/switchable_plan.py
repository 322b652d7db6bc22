"""Switch between several applied plans on one model, at negligible cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from recollect.engine.placed_forward import Applied

__all__ = ["SwitchablePlan"]


class SwitchablePlan:
    """An applied plan or policy that is active only in `on()`; it keeps what it learnt in earlier steps, as in training.

    Args:
        applied: the plan now on the model; it is suspended immediately.

    Example:
        >>> import recollect
        >>> from recollect.lab.models.architectures import llama_config
        >>> from recollect.lab.models.gpt import GPTModel
        >>> model = GPTModel(llama_config(num_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=64))
        >>> plan = recollect.Plan({"decoder.layers.0": recollect.UnitPlan({"mlp.activation_func.silu": "recompute"})})
        >>> plans = [SwitchablePlan(recollect.apply(model, plan)) for _ in range(2)]
        >>> with plans[0].on():
        ...     pass
    """

    def __init__(self, applied: Applied) -> None:
        self._applied = applied
        self._suspension = ExitStack()
        self._suspension.enter_context(applied.suspended())

    @contextmanager
    def on(self) -> Iterator[None]:
        """Activate the plan for a with-block."""
        self._suspension.close()
        try:
            yield
        finally:
            self._suspension.enter_context(self._applied.suspended())
