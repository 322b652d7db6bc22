"""Detect the end of a training step, a loop in which no step ever ends, and one that recreates its optimizer."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from recollect.engine.placed_forward import forward_name, forward_of_user
from recollect.errors import BudgetTooSmallError, RecollectError, RecordError
from recollect.weak_hooks import register_weakly

# Loading or clipping weights between calls is not an optimizer step; updating them again and again is.
_MOST_FOREIGN_UPDATES: Final = 3
# Of one optimizer while the other waits, as a discriminator's steps for each of the generator's.
_MOST_REPEATS: Final = 64
# A loop may skip a batch, as Lightning's does for a `training_step` that returns None, though the optimizer steps.
_MOST_SKIPPED: Final = 3


class StepEnd:
    """Says when all optimizers have stepped.

    There are none to look at, again and again, if the caller says when a step ends.

    Attributes:
        stepped: the class of the last optimizer that did.
        is_lost: a call of the step raised, and what was known of the step is forgotten.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._model_class = type(model).__name__
        self._optimizers = optimizers
        # Any parameter will do: an optimizer's step writes to all those with gradients. L-BFGS does so several times in
        # one step, between runs of the model.
        is_watched = bool(optimizers) and not any(isinstance(found, torch.optim.LBFGS) for found in optimizers)
        self._watched = next((p for p in model.parameters() if p.requires_grad and is_watched), None)
        self._version = self._version_now()
        self._foreign_updates = 0
        self._num_skipped = 0
        self._stepped: dict[int, int] = {}
        # An optimizer that goes on alone, as while a discriminator is trained further: each of its steps then ends one.
        self._alone: int | None = None
        self._has_ended = False
        self.stepped = ""
        self.is_lost = False

    @property
    def is_reached(self) -> bool:
        """Whether there are optimizers to look at, and each has stepped since `begin_next`, or one that goes on alone."""
        return 0 < len(self._optimizers) == len(self._stepped) or bool(self._alone and self._stepped)

    def begin_next(self) -> bool:
        """Forget which optimizers have stepped; return whether the step that they ended was lost."""
        was_lost, self.is_lost = self.is_lost, False
        self._has_ended = True
        if self._alone not in self._stepped:  # The other one has stepped again.
            self._alone = None
        self._stepped.clear()
        return was_lost

    def note_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer stepped; raise if it did so again and again while a different one never did."""
        key, self.stepped = id(optimizer), type(optimizer).__name__
        self._stepped[key] = self._stepped.get(key, 0) + 1
        self._version, self._foreign_updates = self._version_now(), 0
        if self._stepped[key] > _MOST_REPEATS:
            waiting = [
                f"{type(o).__name__} (number {i})" for i, o in enumerate(self._optimizers) if id(o) not in self._stepped
            ]
            if waiting and self._has_ended:
                self._alone = key
            elif waiting:
                raise RecordError(
                    f"attach to {self._model_class}: {type(optimizer).__name__} stepped {self._stepped[key]} times, and "
                    f"{', '.join(waiting)} never did, expected a training step to end with one step of each. "
                    "Pass only the optimizers that step."
                )

    def note_call(self) -> None:
        """Check, before the model is called, that nothing else has updated the parameters again and again."""
        version = self._version_now()
        if version == self._version:
            return
        self._version = version
        self._foreign_updates += not self._stepped
        if self._foreign_updates >= _MOST_FOREIGN_UPDATES:
            names = ", ".join(type(optimizer).__name__ for optimizer in self._optimizers)
            raise RecordError(
                f"attach to {self._model_class}: its parameters were updated {self._foreign_updates} times, and the optimizer "
                f"that was passed ({names}) never stepped, so no training step ends and none is planned. "
                "Pass the optimizer whose step() the loop calls; one that updates in backward cannot be planned for."
            )

    def note_end_of_call(self) -> None:
        """Take what the call itself has written for no update: an embedding with `max_norm` scales its weight in forward."""
        self._version = self._version_now()

    def note_skipped(self, stepped: str, num_calls: int, *, is_planned: bool) -> str:
        """Return the message about a recorded step without a backward; raise if there were several, and nothing is planned."""
        calls = "a call" if num_calls == 1 else f"{num_calls} calls"
        text = f"{stepped}.step() ended a step with {calls} of {self._model_class} in which no backward ran"
        self._num_skipped += not is_planned
        if is_planned or self._num_skipped < _MOST_SKIPPED:
            return f"{text}; nothing was planned for it"
        raise RecordError(
            f"attach to {self._model_class}: {text}, as in {self._num_skipped - 1} before it, expected loss.backward() in a "
            "step, since that is what memory is planned for. To go on without a plan, call remove() on what attach returned."
        )

    def _version_now(self) -> int:
        return -1 if self._watched is None else self._watched._version


def to_user(error: RecollectError, budget: int | str) -> RecollectError:
    """Return an error of the first step without our frames, which would hide the user's, and add where it comes from."""
    if isinstance(error, BudgetTooSmallError):
        remedy = "Call attached.remove() before you attach with a different budget."
        error.args = (f"recollect.attach(budget={budget!r}), after the first step: {error} {remedy}",)
    return error.with_traceback(None)


def changes_weights(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of it may; `torch.distributed.checkpoint` takes one at a learning rate of 0 to make its state."""
    return any(group.get("lr", 1) for group in optimizer.param_groups)


def without_call(model: nn.Module) -> str:
    """Return the message about an optimizer that steps though the model was never called."""
    other = forward_of_user(model)
    if other is not None:
        return (
            f"the optimizer stepped, but {type(model).__name__} was given a new forward after attach, {forward_name(other)}, "
            "so nothing was planned. Call attached.remove(), and attach again"
        )
    return (
        f"the optimizer stepped, but {type(model).__name__} was not called with gradients on, so nothing was planned: the loop "
        "calls parts of it one by one, or copies of it, or calls it inside torch.func.grad or vmap, where nothing can be "
        "planned. Call the model, and take gradients of its loss by backward() or torch.autograd.grad; or put a forward by "
        "parts into attached.call(...)"
    )


class OptimizersSeen:
    """Replaces an optimizer that has stopped stepping by a new one over the same parameters.

    If only this list still holds the old one, it is released with its state before the new one allocates its own.
    Otherwise the new one takes its place at the end of a step in which the old one did not step. An optimizer that
    steps inside a real one, or around it, is none.

    If all of an optimizer's parameters are frozen or gone, as after `get_peft_model`, any optimizer of the model replaces it.

    The list is changed in place. `took_over` is told of the new one, and whether it has stepped already; `warn` of one that
    steps again and again beside them.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        took_over: Callable[[torch.optim.Optimizer, bool], None],
        warn: Callable[[str], None],
    ) -> None:
        self._model, self._optimizers = model, optimizers
        self._took_over, self._warn = took_over, warn
        self._foreign_steps = 0
        # Since the last call of the model, and within the step of an optimizer that is known, whose closure calls the model.
        self._has_stepped = self._is_stepping = self._has_closure = False
        # Before it has stepped once, it is the wrong optimizer, not an old one.
        self._stepped_once: set[int] = set()
        self._handles = [
            register_weakly(register_optimizer_step_pre_hook, self._before),
            register_weakly(register_optimizer_step_post_hook, self._after),
        ]

    def remove(self) -> None:
        """Stop listening, and forget the listeners."""
        self._took_over = lambda _optimizer, _has_stepped: None
        for handle in self._handles:
            handle.remove()

    def note_call(self) -> None:
        self._has_stepped = False
        # Without a closure a call comes after the step, which an error has ended.
        self._is_stepping &= self._has_closure

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        index = self._place_of(optimizer)
        if index is None:
            return
        if self._optimizers[index] is optimizer:
            self._is_stepping = True
            self._has_closure = any(map(callable, [*args[1:], *kwargs.values()]))
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
        if index is not None and self._optimizers[index] is optimizer:
            self._has_stepped, self._is_stepping = True, False
            self._foreign_steps = 0
        elif self._is_stepping or self._has_stepped:
            return
        elif index in self._stepped_once:
            self._optimizers[index] = optimizer
            self._took_over(optimizer, True)
        elif _parameters_of(optimizer) & self._trained():
            self._foreign_steps += 1
            if self._foreign_steps == _MOST_FOREIGN_UPDATES + 1:
                known = ", ".join(type(found).__name__ for found in self._optimizers)
                self._warn(
                    f"{type(optimizer).__name__}, which attach does not know, stepped over parameters of "
                    f"{type(self._model).__name__} {self._foreign_steps} times in a row without a step of {known}: no step "
                    "ends, and none is planned. Call attach when the model is complete, with all optimizers that step"
                )

    def _place_of(self, optimizer: torch.optim.Optimizer) -> int | None:
        """Return the known optimizer that this one is, or the one whose parameters it steps over."""
        for index, known in enumerate(self._optimizers):
            if known is optimizer:
                return index
        if self._is_stepping:
            return None
        own = _parameters_of(optimizer)
        for index, known in enumerate(self._optimizers):
            if not own.isdisjoint(_parameters_of(known)):
                return index
        if own & (trained := self._trained()):
            for index, known in enumerate(self._optimizers):
                if trained.isdisjoint(_parameters_of(known)):
                    self._stepped_once.add(index)
                    return index
        return None

    def _trained(self) -> set[int]:
        return {id(parameter) for parameter in self._model.parameters() if parameter.requires_grad}


def _parameters_of(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
