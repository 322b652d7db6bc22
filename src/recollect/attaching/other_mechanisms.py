"""Notice that a model began to recompute by a mechanism other than recollect's."""

from __future__ import annotations

from torch import nn

from recollect._torch_parallel import is_checkpoint_wrapper

__all__ = ["OtherMechanisms"]

_FLAG = "gradient_checkpointing"


class OtherMechanisms:
    """Looks for checkpoint wrappers and Hugging Face's flag, in microseconds, since it looks in every step.

    Args:
        model: without any of them.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._flags = [vars(module) for module in modules if _FLAG in vars(module)]
        self._children = [(m._modules, name, child) for m in modules for name, child in m._modules.items()]

    def are_on(self) -> bool:
        """Return whether there is one now."""
        return any(flags.get(_FLAG) is True for flags in self._flags) or any(
            (now := children.get(name)) is not child and now is not None and is_checkpoint_wrapper(now)
            for children, name, child in self._children
        )
