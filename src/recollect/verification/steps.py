"""Run the step to verify, repeatedly from the same state: the step of the most common loop, or the user's own."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from recollect.engine.content import has_same_bits
from recollect.measuring.meter import storage_bytes
from recollect.recording.model_step import Step
from recollect.recording.optimizers import optimizers_in
from recollect.recording.restored_state import (
    free_gradients,
    present_generators,
    present_state,
    restored_attributes,
    restored_buffers,
    restored_generators,
)
from recollect.verification.compare import Computed, state_after


@dataclass(eq=False)
class _RepeatedStep:
    """A step that can run any number of times from the same state."""

    given: Step

    def __post_init__(self) -> None:
        self.model, self.device = self.given.model, self.given.device
        self._put_generators_back = present_generators()
        self._has_begun = False
        # Gradients in memory when the second step of the loop begins.
        self.left_gradients_bytes = 0
        # Called when the next one begins.
        self.done: Callable[[], object] = lambda: None

    def clear(self) -> None:
        free_gradients(self.model.parameters())

    def _seed(self) -> None:
        if self._has_begun:
            self.done()
        self._has_begun = True
        self._put_generators_back()
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.manual_seed(0)


@dataclass(eq=False)
class BatchStep(_RepeatedStep):
    """`out = model(**batch); out.loss.backward()`; see `verify` and `record`."""

    def undisturbed(self) -> Any:
        """Return a context after which everything is as it was before."""
        return self.given.undisturbed()

    def clear(self) -> None:
        super().clear()
        self.given.free_gradients_beside()

    def run(self) -> Computed:
        """Run one step; the loss counts as one of the gradients."""
        self.clear()
        with restored_buffers(self.model):
            self._seed()
            _, loss = self.given.forward()
            self.given.backward(loss)
            state = state_after(self.model, self.device)
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        self.clear()
        return Computed(gradients={"the loss": loss.detach(), **gradients}, state=state)

    def prepare_loop(self) -> None:
        """Make the gradients that exist before the first step, if the loop adds to them."""
        self.given.prepare_gradients()

    def loop(self) -> None:
        held, given = None, self.given
        # As an optimizer knows them: after forward, FSDP2 may have others in their place.
        trained = list(self.model.parameters())
        with restored_buffers(self.model):
            for _ in range(2):
                self._seed()
                output = given.output()
                # The last step's output, and with it the last loss, a scalar.
                held = output if given.holds_output else None
                loss = given.loss_in(output)
                del output
                if given.gradients == "held":
                    free_gradients(trained)
                given.backward(loss)
                held = (held, loss) if given.holds_output else None
                del loss
                if given.gradients == "freed":
                    self.clear()
        del held


@dataclass(eq=False)
class OwnStep(_RepeatedStep):
    """The user's own step, from the same parameters, gradients, buffers and optimizer state each time; see `verify`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        optimizers = optimizers_in(self.given.optimizer)
        stepped = (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
        # Of other models, too, such as a GAN's discriminator: what they compute changes with them.
        self._trained = list({id(p): p for p in (*self.model.parameters(), *stepped)}.values())
        self._parameters = [(p, p.detach().clone(), p.grad) for p in self._trained]
        self._put_back = [present_state(optimizer) for optimizer in optimizers]

    def clear(self) -> None:
        free_gradients(self._trained)

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
            self.given.run()
            state = state_after(self.model, self.device)
        named = list(self.model.named_parameters())
        computed = {name: p.grad.clone() for name, p in named if p.grad is not None}
        computed |= {f"parameter {name}": p.detach().clone() for name, p in named}
        self._restore()
        return Computed(gradients=computed, state=state)

    def prepare_loop(self) -> None:
        self._restore()

    def loop(self) -> None:
        """Run two steps: the second one finds the values that the first one leaves behind."""
        with restored_buffers(self.model):
            for _ in range(2):
                gradients = (parameter.grad for parameter in self.model.parameters())
                self.left_gradients_bytes = storage_bytes(g for g in gradients if g is not None)
                self._seed()
                self.given.run()

    def _restore(self) -> None:
        with torch.no_grad():
            for parameter, before, _ in self._parameters:
                if not has_same_bits(parameter, before):
                    parameter.copy_(before)
        self.clear()
        for put_back in self._put_back:
            put_back()


VerifiedStep: TypeAlias = BatchStep | OwnStep
