"""Notice between steps that a model is built otherwise than before: layers, parameters, hooks, another way to recompute.

It looks in every step, so it takes microseconds: PyTorch says when something is registered in a module, and the rest shows in
the lengths of dictionaries and tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from recollect._torch_parallel import is_checkpoint_wrapper
from recollect.engine.partitioned import is_partitioned
from recollect.weak_hooks import register_weakly

_FLAG = "gradient_checkpointing"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")


class Structure:
    """How a model is built.

    Args:
        model: without another mechanism that recomputes.

    Attributes:
        parameters: of the model, when `look` last found a change.
        version: how often it did.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.version = 0
        self._is_stale = False
        self._handles = [
            register_weakly(register, self._note)
            for register in (register_module_module_registration_hook, register_module_parameter_registration_hook)
        ]
        self._read()

    def remove(self) -> None:
        """Stop listening."""
        for handle in self._handles:
            handle.remove()

    def look(self) -> bool:
        """Return whether anything has changed since the last time."""
        shape, num_hooks = self._shape(), sum(map(len, self._hooks))
        if not self._is_stale and shape == self._seen_shape and num_hooks == self._num_hooks:
            return False
        before, hooks_before = self._built(), self._num_hooks
        self._read()
        has_changed = before != self._built() or hooks_before < self._num_hooks
        self.version += has_changed
        return has_changed

    def recomputes(self) -> bool:
        """Return whether layers recompute by checkpoint wrappers, or Hugging Face's switch."""
        return any(flags.get(_FLAG) is True for flags in self._flags) or self._has_wrappers

    def _note(self, module: nn.Module, name: str, registered: Any) -> None:
        """Note that something is about to be registered in one of the modules, in place of something else."""
        if id(module) in self._ids and not any(
            vars(module)[kind].get(name) is registered for kind in ("_modules", "_parameters")
        ):
            self._is_stale = True

    def _built(self) -> tuple[list[int], list[int], int]:
        """Return what tells modules, parameters, and the sizes of these apart from others."""
        return [*map(id, self._modules)], [*map(id, self.parameters)], self._seen_shape[0]

    def _shape(self) -> tuple[int, int]:
        return sum(map(torch.Tensor.numel, self._sized)), sum(map(len, self._children))

    def _read(self) -> None:
        self._modules = list(self._model.modules())
        self._ids = set(map(id, self._modules))
        self.parameters: Sequence[torch.Tensor] = list(self._model.parameters())
        # DeepSpeed's ZeRO-3 gathers parameters and frees them again.
        self._sized = [parameter for parameter in self.parameters if not is_partitioned(parameter)]
        self._children: list[dict[str, Any]] = [m._modules for m in self._modules] + [
            m._parameters for m in self._modules
        ]
        self._hooks: list[dict[int, Any]] = [getattr(module, name) for module in self._modules for name in _HOOKS]
        self._flags = [vars(module) for module in self._modules if _FLAG in vars(module)]
        self._has_wrappers = any(map(is_checkpoint_wrapper, self._modules))
        self._seen_shape = self._shape()
        self._num_hooks = sum(map(len, self._hooks))
        self._is_stale = False
