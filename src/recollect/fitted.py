"""Say so when a loop does what the step that `fit` planned did not: a larger batch, training mode, an optimizer with state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from recollect._torch_private import uncompiled
from recollect.byte_format import format_bytes
from recollect.engine.placed_forward import PlacedForward
from recollect.errors import BudgetWarning
from recollect.recording.optimizers import present_state_bytes
from recollect.tensors import tensors_in
from recollect.warning import warn_user
from recollect.weak_hooks import register_weakly

__all__ = ["FittedForward", "left_out"]


def left_out(model: nn.Module, *, has_optimizer: bool) -> list[str]:
    """Return what a plan does not count that is made of a model as it is now, in words."""
    found = []
    if not has_optimizer and any(parameter.requires_grad for parameter in model.parameters()):
        found.append("counts no optimizer: fit got none")
    if not any(module.training for module in model.modules()):
        found.append("made for the model in eval mode")
    return found


class FittedForward(PlacedForward):
    """Stands around a model's forward, and looks at what it is called with; recomputes nothing.

    Args:
        model: that was fitted.
        batch: what it was recorded with; None if that was a step of the loop's own.
        has_optimizer: an optimizer was counted.
        device: where the model runs.
    """

    def __init__(self, model: nn.Module, batch: Any, *, has_optimizer: bool, device: torch.device) -> None:
        super().__init__(model)
        self.device = device
        self.shapes = [tuple(tensor.shape) for tensor in tensors_in(batch)]
        self.numel = sum(tensor.numel() for tensor in tensors_in(batch)) if self.shapes else None
        self.is_training = any(module.training for module in model.modules())
        self.said: set[str] = set()
        if not has_optimizer:
            register_weakly(register_optimizer_step_post_hook, self._stepped)

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward."""
        if self.recomputes():
            self._look(args, kwargs)
        return self.forward(*args, **kwargs)

    def _look(self, args: Any, kwargs: Any) -> None:
        found = tensors_in((args, kwargs))
        if self.numel is not None and sum(tensor.numel() for tensor in found) > self.numel:
            sizes = " and ".join(_largest(shapes) for shapes in ([tuple(t.shape) for t in found], self.shapes))
            self._say(f"got a larger batch than its plan was made for (shapes {sizes})")
        if self.module.training and not self.is_training:
            self._say("trains, and its plan was made in eval mode, in which dropout and batch norm hold less")

    def _stepped(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if not self.is_on:
            return
        own = set(map(id, self.module.parameters()))
        nbytes = present_state_bytes([optimizer], self.device)
        if nbytes and any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            name = type(optimizer).__name__
            self._say(f"is trained by {name}, whose state of {format_bytes(nbytes)} its plan does not count")

    def _say(self, text: str) -> None:
        if text[:12] not in self.said:
            self.said.add(text[:12])
            warn_user(
                f"recollect: {type(self.module).__name__} {text}: the peak may exceed the budget. Call fit again as the loop "
                "trains (model.train(), its largest batch, optimizer=...); or use attach, which follows the loop.",
                BudgetWarning,
            )


def _largest(shapes: Sequence[tuple[int, ...]]) -> str:
    return str(list(max(shapes, key=math.prod, default=())))
