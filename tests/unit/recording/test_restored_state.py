"""What a step changes is restored, and what hangs on the parameters does not notice it."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import recollect
from blocks import Computes
from recollect.engine.content import has_same_bits
from recollect.errors import RecordError
from recollect.recording.model_step import Step
from recollect.recording.restored_state import restored_buffers, undisturbed
from scaled_model import ROWS, Scaled


def _disturb(model: nn.Module, batch: Any, loss_fn: Callable[[Any], Tensor] | None) -> None:
    Step(model, batch, loss_fn=loss_fn).forward()[1].backward()
    torch.rand(3)
    for buffer in model.buffers():
        buffer.add_(1)


def test_undisturbed_restores_after_an_exception() -> None:
    model = Scaled(lambda self, x: self.weight * x.mean())
    model.weight.grad = grad = torch.tensor(5.0)
    generator = torch.get_rng_state()
    with pytest.raises(KeyError, match="stop"), undisturbed(model):
        _disturb(model, ROWS, None)
        raise KeyError("stop")
    assert model.weight.grad is grad and grad.item() == 5
    assert model.count.item() == 0
    assert torch.equal(generator, torch.get_rng_state())


def test_what_else_backward_reaches_has_its_own_gradient() -> None:
    """A batch that requires grad, and a loss with weights; the first step of a loop would add to what is left there."""
    model, batch, loss = nn.Linear(2, 2), torch.ones(3, 2, requires_grad=True), nn.BatchNorm1d(2)
    batch.grad = before = torch.ones(3, 2)
    loss_fn = Scaled(lambda self, x: (self.weight * loss(x)).square().sum())
    plan = recollect.fit(model, batch, "100%", loss_fn=loss_fn)
    recollect.verify(model, batch, plan, loss_fn=loss_fn, time=False)
    assert batch.grad is before and before.eq(1).all()
    assert loss.weight.grad is loss_fn.weight.grad is None


@pytest.mark.parametrize("value", [float("nan"), -0.0])
def test_buffers_are_restored_to_the_bit(value: float) -> None:
    model = nn.BatchNorm1d(2)
    assert model.running_mean is not None
    before = model.running_mean.fill_(value).clone()
    with restored_buffers(model):
        model(torch.ones(3, 2))
        model.running_mean.zero_()
    assert has_same_bits(model.running_mean, before)


class Counting(nn.Module):
    """Makes a table on its first run, draws from every generator there is, and depends on all that its attributes hold."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.runs, self.mean, self.calls, self.seen = 0, torch.zeros(4), [0.5], {"rows": 1}
        self.of_torch = torch.Generator().manual_seed(1)
        self.of_python, self.of_numpy = random.Random(2), np.random.default_rng(3)

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        self.table = torch.arange(4.0)
        self.mean.mul_(0.5).add_(x.detach().mean(0))
        self.calls.append(self.of_python.random() * self.of_numpy.random())
        self.seen["rows"] += len(x)
        drawn = torch.rand(4, generator=self.of_torch) + random.random() + float(np.random.rand()) + torch.rand(4)
        return self.linear(x * self.table).sin() * drawn * sum(self.calls) * self.seen["rows"] + self.mean


def states() -> list[Any]:
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]


def test_attributes_counters_tables_and_generators_of_python_and_numpy() -> None:
    outputs = []
    for is_recorded in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        model = nn.Sequential(Counting(), Counting())
        before = states()
        if is_recorded:
            assert len(recollect.record(model, torch.ones(3, 4), loss_fn=lambda out: out.sum()).calls) == 2
        assert [module.runs for module in model] == [0, 0]
        assert not any(hasattr(module, "table") for module in model)
        assert states() == before
        outputs.append(model(torch.ones(3, 4)))
    assert torch.equal(*outputs)


def test_hooks_that_the_first_forward_installs_are_removed_with_what_remembers_them() -> None:
    class Installing(Counting):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "is_installed"):
                self.linear.register_forward_hook(lambda *_: None)
                self.is_installed = True
            return super().forward(x)

    model = nn.Sequential(Installing(), Installing())
    recollect.record(model, torch.ones(3, 4), loss_fn=lambda out: out.sum())
    assert not any(module.linear._forward_hooks or hasattr(module, "is_installed") for module in model)


def test_an_optimizer_that_steps_in_backward_does_not() -> None:
    model = nn.Sequential(Counting(), Counting())
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def step(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
        parameter.register_hook(lambda gradient: pytest.fail("a hook of a parameter ran"))
    recollect.record(model, torch.ones(3, 4), loss_fn=lambda out: out.sum())
    assert all(has_same_bits(a, b.detach()) for a, b in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_tied_and_recurrent_parameters_are_put_back() -> None:
    layers = nn.ModuleList(nn.GRU(4, 4, batch_first=True) for _ in range(2))
    first, last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    model = Computes(
        lambda self, x: self.last(self.layers[1](self.layers[0](self.first(x))[0])[0]),
        layers=layers,
        first=first,
        last=last,
    )
    model.last.weight = model.first.weight
    own = dict(model.named_parameters())
    recollect.record(model, torch.ones(2, 3, 4), loss_fn=lambda out: out.sum(), units=["layers.0", "layers.1"])
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in own.items()}
    assert model.last.weight is model.first.weight
    model(torch.ones(2, 3, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_partitioned_parameters_are_refused_by_name() -> None:
    model = nn.Sequential(Counting(), Counting())
    model[1].linear.weight.ds_id = 7  # as DeepSpeed ZeRO-3 marks those that it has partitioned
    with pytest.raises(RecordError, match=r"ZeRO-3 has partitioned its parameter '1.linear.weight'.*or pass step="):
        recollect.record(model, torch.ones(3, 4), loss_fn=lambda out: out.sum())


def test_parameters_without_a_shape_are_refused() -> None:
    model = nn.Sequential(nn.Sequential(nn.LazyLinear(4), nn.ReLU()), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    with pytest.raises(
        RecordError, match=r"its parameter '0.0.weight' has no shape before the first forward. Run the model"
    ):
        recollect.record(model, torch.ones(3, 4), loss_fn=lambda out: out.sum())
