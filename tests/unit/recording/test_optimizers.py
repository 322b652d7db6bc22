"""What counts as the optimizers of a step: one, several, or inside a wrapper; and the state that they have now."""

import importlib.util
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer

import recollect
from optimizer_steps import CPU, give_gradients
from recollect.errors import RecordError
from recollect.measuring.meter import storage_bytes
from recollect.profile import events
from recollect.recording.optimizer_step import OptimizerStep, record_optimizer_step
from recollect.recording.optimizers import check_optimizers, optimizers_in, present_state_bytes, state_tensors
from small_llama import llama_step


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 50), nn.Linear(50, 20))


def step(module: nn.Module, *optimizers: Any) -> None:
    give_gradients(module)
    for optimizer in optimizers:
        optimizer.step()


class Wrapper(Optimizer):
    """Hands everything on, as Accelerate's does: its own constructor does not run."""

    inner = "optimizer"

    def __init__(self, optimizer: Optimizer) -> None:
        setattr(self, self.inner, optimizer)

    @property
    def state(self) -> Any:  # type: ignore[override]
        return getattr(self, self.inner).state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return getattr(self, self.inner).param_groups

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return getattr(self, self.inner).step(closure)


class Averaged(Wrapper):
    """Names it as PyTorch's PostLocalSGDOptimizer does."""

    inner = "optim"


class Private(Wrapper):
    """Names it as Opacus's do."""

    inner = "original_optimizer"


class Handle:
    """No optimizer itself, and without any state."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer


class Container(Optimizer):
    """Several in one, as in torchtitan."""

    def __init__(self, *optimizers: Optimizer) -> None:
        self.optimizers = list(optimizers)


class Lookahead(Optimizer):
    """Around another optimizer, with a second copy of the weights as state of its own."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.state: Any = defaultdict(dict)
        self.defaults = optimizer.defaults

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.optimizer.step()
        for group in self.param_groups:
            for parameter in filter(lambda p: p.requires_grad, group["params"]):
                self.state[parameter].setdefault("slow", parameter.detach().clone())


def test_wrapped_and_several() -> None:
    module = model()
    first, second = AdamW(module[0].parameters()), SGD(module[1].parameters())
    assert optimizers_in(None) == []
    assert optimizers_in(first) == [first]
    assert optimizers_in(Wrapper(Wrapper(first))) == [first]
    assert optimizers_in(Averaged(first)) == [first]
    assert optimizers_in(Private(first)) == [first]
    assert optimizers_in(Handle(first)) == [first]
    assert optimizers_in([first, (Wrapper(second), None)]) == [first, second]
    assert optimizers_in({"d": first, "g": second}) == [first, second]
    assert optimizers_in(Container(first, second)) == [first, second]
    assert optimizers_in([first, Wrapper(first)]) == [first]


@pytest.mark.parametrize("thing", [nn.Linear(2, 2), iter([]), [nn.Linear(2, 2)]])
def test_what_is_no_optimizer(thing: Any) -> None:
    message = (
        r"^optimizer: got a (Linear|list_iterator), expected an optimizer of torch\.optim or one made like them, with "
        r"`param_groups`, `state` and `step`; several as a list\.$"
    )
    with pytest.raises(RecordError, match=message):
        record_optimizer_step(thing, CPU)


def test_wrapper_with_state_of_its_own_counts_with_it() -> None:
    module = nn.Sequential(*model(), nn.Linear(20, 1000).requires_grad_(False))
    optimizer = Lookahead(AdamW(module.parameters(), foreach=False))
    parameter_bytes = storage_bytes(p for p in module.parameters() if p.requires_grad)
    expected_bytes = record_optimizer_step(optimizer.optimizer, CPU).state_bytes + parameter_bytes
    assert record_optimizer_step(optimizer, CPU).state_bytes == expected_bytes
    assert present_state_bytes(optimizer, CPU) == 0
    step(module, optimizer)
    assert record_optimizer_step(optimizer, CPU).state_bytes == present_state_bytes(optimizer, CPU) == expected_bytes


def test_several_optimizers_step_one_after_the_other() -> None:
    module = model()
    matrices = [p for p in module.parameters() if p.dim() == 2]
    vectors = [p for p in module.parameters() if p.dim() == 1]
    several = [Muon(matrices), AdamW(vectors, foreach=False)]
    found = record_optimizer_step(several, CPU)
    alone = [record_optimizer_step(optimizer, CPU) for optimizer in several]
    assert found.state_bytes == sum(one.state_bytes for one in alone)
    assert len(found.events) == sum(len(one.events) for one in alone)
    allocated = [event[1] for event in found.events if event[0] == events.ALLOC]
    assert len(allocated) == len(set(allocated))
    step(module, *several)
    assert found.state_bytes == storage_bytes(state_tensors(several)) == present_state_bytes(several, CPU)


def test_state_that_exists_is_the_truth() -> None:
    """Here it was cast after it was loaded, which no settings tell."""
    module = model()
    optimizer = AdamW(module.parameters(), foreach=False)
    step(module, optimizer)
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].bfloat16()
    real_bytes = storage_bytes(state_tensors(optimizer))
    assert record_optimizer_step(optimizer, CPU).state_bytes == present_state_bytes(optimizer, CPU) == real_bytes


def test_state_that_exists_in_part_is_counted_as_it_will_be() -> None:
    module = model()
    optimizer = AdamW(module.parameters())
    expected = record_optimizer_step(optimizer, CPU)
    module[0].weight.grad = torch.ones_like(module[0].weight)
    optimizer.step()
    assert record_optimizer_step(optimizer, CPU) == expected
    assert present_state_bytes(optimizer, CPU) < expected.state_bytes


def test_recorded_with_two_optimizers() -> None:
    """Accelerate's wrapper around one, the other as it is."""
    module, batch = llama_step(1, 4)
    parameters = list(module.parameters())
    optimizers = [Wrapper(AdamW(parameters[:5])), SGD(parameters[5:], lr=0.1, momentum=0.9)]
    profile = recollect.record(module, batch, optimizer=optimizers)
    state_bytes = record_optimizer_step(optimizers, CPU).state_bytes
    assert profile.persistent["optimizer_state"] == state_bytes > storage_bytes(parameters)
    plan = recollect.plan(profile, "100%")
    report = recollect.verify(module, batch, plan, optimizer=optimizers)
    assert report.equal


def test_optimizer_of_another_model() -> None:
    module, batch = llama_step(1, 4)
    other = AdamW(llama_step()[0].parameters())
    message = (
        r"^optimizer: none of the \d+ parameters of AdamW is a parameter of this GPTModel, so it trains a different model, or "
        r"this one's parameters were replaced after it was made\. Make it from this model's parameters\(\)\.$"
    )
    with pytest.raises(RecordError, match=message):
        recollect.record(module, batch, optimizer=other)
    with pytest.raises(RecordError, match=r"parameters of Adam and AdamW"):
        check_optimizers(module, [Adam(model().parameters()), other])


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    module = model()
    prepared, optimizer = accelerate.Accelerator(cpu=True).prepare(module, AdamW(module.parameters()))
    expected = record_optimizer_step(AdamW(prepared.parameters()), CPU)
    assert record_optimizer_step(optimizer, CPU) == expected != OptimizerStep(0, ())


@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.\w+` is deprecated")
def test_zero_redundancy_optimizer_counts_its_share(tmp_path: Any) -> None:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "s"), 1), rank=0, world_size=1
    )
    try:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        module = model()
        optimizer = ZeroRedundancyOptimizer(module.parameters(), AdamW, foreach=False)
        found = record_optimizer_step(optimizer, CPU)
        step(module, optimizer)
        assert found.state_bytes == present_state_bytes(optimizer, CPU) == storage_bytes(state_tensors(optimizer.optim))
    finally:
        torch.distributed.destroy_process_group()


def test_workspace_of_muon() -> None:
    """It multiplies each matrix, in bf16, by its transpose from the side that makes the smaller square."""
    for rows, columns in ((90, 40), (40, 90)):
        found = record_optimizer_step(Muon(nn.Linear(rows, columns, bias=False).parameters()), CPU)
        assert {event[2] for event in found.events if event[0] == events.ALLOC} >= {40 * 40 * 2, 90 * 40 * 2}
        assert not {event[2] for event in found.events if event[0] == events.ALLOC} & {90 * 90 * 2}
