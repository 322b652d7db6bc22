"""Steps of training that end in backward in every way, each noted: losses, gradients, and all that they change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from contract_units import ROWS, WIDTH, Model
from gradients import Step

# What units of the registry do on purpose, and are warned of.
QUIET = [
    pytest.mark.filterwarnings(r"ignore:.*`torch\.jit\.\w+` is deprecated"),
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:recollect. torch.utils.checkpoint has no effect", "ignore:Attempted to insert"),
    pytest.mark.filterwarnings(
        "ignore:recollect.*run on the tape, exactly", "ignore:The PyTorch API of nested tensors"
    ),
]


class Run:
    """Trains a model of the registry, and notes what it computes."""

    def __init__(self, model: Model) -> None:
        self.model, self.case = model, model.case
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(trainable or [torch.zeros(1)], lr=0.01)
        self.noted: Step = {}
        self.step = 0
        self.generator = torch.Generator().manual_seed(1)
        torch.manual_seed(5)

    def through(self, *steps: Callable[[Run], None]) -> Step:
        """Run steps; return all that was noted so far."""
        for step in steps:
            step(self)
        return self.noted

    def losses(self) -> tuple[Tensor, list[Tensor]]:
        """Return a new input, and the loss of each output."""
        data = torch.randn(ROWS, WIDTH, generator=self.generator).to(self.case.dtype).requires_grad_()
        losses = self.model(data)
        self.note("loss", torch.stack(losses))
        return data, losses

    def loss(self) -> tuple[Tensor, Tensor]:
        data, losses = self.losses()
        return data, torch.stack(losses).sum()

    def note(self, what: str, tensor: Tensor | None) -> None:
        if tensor is not None:
            name = f"step {self.step}: {what}"
            while name in self.noted:
                name += "'"
            self.noted[name] = tensor.detach().clone()

    def end_step(self, *inputs: Tensor) -> None:
        for data in inputs:
            self.note("gradient of the input", data.grad)
        for name, parameter in self.model.named_parameters():
            self.note(f"gradient of {name}", parameter.grad)
        for name, tensor in self.model.state_dict().items():
            self.note(name, tensor)
        self.note("generator", torch.get_rng_state())
        self.note("counts", torch.tensor([unit.count for unit in self.model.units]))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1


def plain(run: Run) -> None:
    data, loss = run.loss()
    loss.backward()
    run.end_step(data)


def accumulated(run: Run) -> None:
    inputs = []
    for _ in range(2):
        data, loss = run.loss()
        loss.backward()
        inputs.append(data)
    run.end_step(*inputs)


def out_of_order(run: Run) -> None:
    """Several forwards are in flight."""
    if run.case.is_alone:
        return
    first, second, third = run.loss(), run.loss(), run.loss()
    for _, loss in (second, first, third):
        loss.backward()
    run.end_step(first[0], second[0], third[0])


def twice(run: Run) -> None:
    data, loss = run.loss()
    loss.backward(retain_graph=True)
    loss.backward()
    run.end_step(data)


def of_the_input(run: Run) -> None:
    data, loss = run.loss()
    run.note("gradient of the input", torch.autograd.grad(loss, data, allow_unused=True)[0])
    run.end_step()


def of_one_weight(run: Run) -> None:
    data, loss = run.loss()
    weight = run.model.units[0].first.weight
    if weight.requires_grad:
        run.note("gradient of one", torch.autograd.grad(loss, weight, retain_graph=True, allow_unused=True)[0])
    loss.backward()
    run.end_step(data)


def of_each_output(run: Run) -> None:
    data, losses = run.losses()
    for loss in losses:
        if loss.requires_grad:
            loss.backward(retain_graph=True)
    run.end_step(data)


def under_autocast(run: Run) -> None:
    if run.case.is_composite:
        return
    data, loss = run.loss()
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    run.end_step(data)


def evaluated(run: Run) -> None:
    run.model.eval()
    with torch.no_grad():
        run.loss()
    run.model.train()


# The first call of a unit runs on the tape on each engine.
BACKWARDS: tuple[Callable[[Run], None], ...] = (
    *(plain, plain, accumulated, out_of_order, evaluated, twice),
    *(of_the_input, of_one_weight, of_each_output, under_autocast, plain),
)
