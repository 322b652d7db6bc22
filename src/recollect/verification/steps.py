"""Run the step to verify, again and again from the same state: that of the commonest loop, or the user's own."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from recollect.engine.content import has_same_bits
from recollect.recording.model_step import LossFunction, loss_in, prepare_gradients, run_forward, run_model
from recollect.recording.optimizers import Optimizers, optimizers_in
from recollect.recording.restored_state import (
    free_gradients,
    restored_attributes,
    restored_buffers,
    restored_generators,
    undisturbed,
)
from recollect.recording.step_recording import Gradients
from recollect.verification.compare import Computed, state_after


class VerifiedStep(ABC):
    """A step that runs as often as it takes.

    Args:
        model: whose parameters are trained.
        device: where it runs.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self.device = device
        self._random_state = torch.random.get_rng_state()

    @abstractmethod
    def undisturbed(self) -> Any:
        """Return a context after which everything is as it was before."""

    @abstractmethod
    def run(self) -> Computed:
        """Run one step from the same state as ever; return what it computed."""

    @abstractmethod
    def prepare_loop(self) -> None:
        """Make what is there before the first step of the loop."""

    @abstractmethod
    def loop(self) -> None:
        """Run two steps of the loop, so that the second one finds what the first one left behind."""

    def clear(self) -> None:
        """Free the gradients."""
        free_gradients(self.model.parameters())

    def _seed(self) -> None:
        torch.random.set_rng_state(self._random_state)
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.manual_seed(0)


class BatchStep(VerifiedStep):
    """`out = model(**batch); out.loss.backward()`.

    Args:
        model: see `verify`.
        device: where it runs.
        batch: see `verify`.
        loss_fn: see `verify`.
        holds_output: see `record`.
        gradients: see `record`.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        batch: Any,
        loss_fn: LossFunction | None,
        *,
        holds_output: bool,
        gradients: Gradients,
    ) -> None:
        super().__init__(model, device)
        self._batch = batch
        self._loss_fn = loss_fn
        self._holds_output = holds_output
        self._gradients = gradients

    def undisturbed(self) -> Any:
        """Return a context after which everything is as it was before."""
        return undisturbed(self.model)

    def run(self) -> Computed:
        """Run one step; the loss counts as one of the gradients."""
        self.clear()
        with restored_buffers(self.model):
            self._seed()
            _, loss = run_forward(self.model, self._batch, self._loss_fn)
            loss.backward()
            state = state_after(self.model, self.device)
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        self.clear()
        return Computed(gradients={"the loss": loss.detach(), **gradients}, state=state)

    def prepare_loop(self) -> None:
        """Make the gradients that are there before the first step, if the loop adds to them."""
        prepare_gradients(self.model, self._gradients)

    def loop(self) -> None:
        """Run two steps, holding what the loop holds."""
        held: Any = None
        # As an optimizer knows them: after forward, FSDP2 may have others in their place.
        trained = list(self.model.parameters())
        with restored_buffers(self.model):
            for _ in range(2):
                self._seed()
                output = run_model(self.model, self._batch)
                # The last one's output, and with it the last loss, which is a scalar.
                held = output if self._holds_output else None
                loss = loss_in(output, type(self.model).__name__, self._loss_fn)
                del output
                if self._gradients == "held":
                    free_gradients(trained)
                loss.backward()
                held = (held, loss) if self._holds_output else None
                del loss
                if self._gradients == "freed":
                    self.clear()
        del held


class OwnStep(VerifiedStep):
    """The user's own step, from the same parameters, gradients, buffers and optimizer state each time.

    Args:
        model: see `verify`.
        device: where it runs.
        step: see `verify`.
        optimizer: those that the step may run.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, step: Callable[[], object], optimizer: Optimizers
    ) -> None:
        super().__init__(model, device)
        self._step = step
        self._optimizers = optimizers_in(optimizer)
        self._parameters = [(p, p.detach().clone(), p.grad) for p in model.parameters()]
        self._states = [copy.deepcopy(found.state_dict()) for found in self._optimizers]

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Return a context after which parameters, gradients, buffers, optimizers and generators are as before."""
        with ExitStack() as stack:
            stack.enter_context(restored_generators(self.model))
            stack.enter_context(restored_attributes(self.model))
            stack.enter_context(restored_buffers(self.model))
            try:
                yield
            finally:
                self._restore()
                for parameter, _, gradient in self._parameters:
                    parameter.grad = gradient

    def run(self) -> Computed:
        """Run one step; parameters after it count as gradients do."""
        self._restore()
        with restored_buffers(self.model):
            self._seed()
            self._step()
            state = state_after(self.model, self.device)
        named = list(self.model.named_parameters())
        computed = {name: p.grad.clone() for name, p in named if p.grad is not None}
        computed |= {f"parameter {name}": p.detach().clone() for name, p in named}
        self._restore()
        return Computed(gradients=computed, state=state)

    def prepare_loop(self) -> None:
        """Restore the state before the first step."""
        self._restore()

    def loop(self) -> None:
        """Run two steps, so that the second one finds what the first one holds outside of it."""
        with restored_buffers(self.model):
            for _ in range(2):
                self._seed()
                self._step()

    def _restore(self) -> None:
        with torch.no_grad():
            for parameter, before, _ in self._parameters:
                if not has_same_bits(parameter, before):
                    parameter.copy_(before)
        self.clear()
        for optimizer, state in zip(self._optimizers, self._states, strict=True):
            optimizer.load_state_dict(copy.deepcopy(state))
