"""Notice that a loop trains with another optimizer than the one that was passed: one that it made anew in the middle."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from recollect.weak_hooks import register_weakly


class OptimizersSeen:
    """Puts an optimizer in the place of one over the same parameters that has stopped stepping.

    If nobody but this list holds the old one any more, it goes, with its state, before the new one makes its own. Else the new
    one takes its place at the end of a step in which the old one did not step. An optimizer that steps inside another one, or
    around it, is none.

    Args:
        optimizers: whose steps end a training step; changed in place.
        took_over: told of the new one, and whether it has stepped already.
    """

    def __init__(
        self, optimizers: list[torch.optim.Optimizer], took_over: Callable[[torch.optim.Optimizer, bool], None]
    ) -> None:
        self._optimizers = optimizers
        self._took_over = took_over
        # Since the last call of the model, and within the step of an optimizer that is known.
        self._has_stepped = self._is_stepping = False
        # Before it has stepped once, it is the wrong one, rather than an old one.
        self._stepped_once: set[int] = set()
        self._handles = [
            register_weakly(register_optimizer_step_pre_hook, self._before),
            register_weakly(register_optimizer_step_post_hook, self._after),
        ]

    def remove(self) -> None:
        """Stop listening."""
        for handle in self._handles:
            handle.remove()

    def note_call(self) -> None:
        """Note that the model is about to be called."""
        self._has_stepped = self._is_stepping = False

    def _before(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        index = self._place_of(optimizer)
        if index is None:
            return
        if self._optimizers[index] is optimizer:
            self._is_stepping = True
            self._stepped_once.add(index)
        if self._optimizers[index] is optimizer or index not in self._stepped_once:
            return
        old = weakref.ref(self._optimizers[index])
        self._optimizers[index] = optimizer
        if (held := old()) is not None:
            self._optimizers[index] = held
        else:
            self._took_over(optimizer, False)

    def _after(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        index = self._place_of(optimizer)
        if index is None:
            return
        if self._optimizers[index] is optimizer:
            self._has_stepped, self._is_stepping = True, False
        elif not self._has_stepped and index in self._stepped_once:
            self._optimizers[index] = optimizer
            self._took_over(optimizer, True)

    def _place_of(self, optimizer: torch.optim.Optimizer) -> int | None:
        """Return which of the known optimizers this one is, or else whose parameters it steps over."""
        for index, known in enumerate(self._optimizers):
            if known is optimizer:
                return index
        if self._is_stepping:
            return None
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for index, known in enumerate(self._optimizers):
            if any(id(parameter) in own for group in known.param_groups for parameter in group["params"]):
                return index
        return None
