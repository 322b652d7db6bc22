"""Hugging Face's own switch for recomputation. Its methods have new names in transformers 5.23; 5.17 knows only the old."""

from typing import Any


def enable(model: Any, settings: dict[str, Any] | None = None) -> None:
    """Have every layer recompute; `settings` go to `torch.utils.checkpoint`."""
    new_name = getattr(model, "activation_checkpointing_enable", None)
    (new_name or model.gradient_checkpointing_enable)(settings)


def disable(model: Any) -> None:
    """Undo `enable`."""
    new_name = getattr(model, "activation_checkpointing_disable", None)
    (new_name or model.gradient_checkpointing_disable)()
