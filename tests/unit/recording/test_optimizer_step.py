"""What an optimizer step needs, predicted without touching the optimizer, against a real step that is measured."""

import copy
import itertools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Optimizer, RMSprop

import recollect
from optimizer_steps import CPU, give_gradients, peak_bytes
from recollect.lab.models.architectures import llama_config
from recollect.lab.models.gpt import GPTModel
from recollect.measuring.meter import measure_peak, storage_bytes
from recollect.recording.optimizer_step import OptimizerStep, record_optimizer_step

Build = Callable[[Iterable[Any]], Optimizer]

# Optimizers work in fp32 scalars too (step counts, bias corrections): a few bytes for each parameter.
SCALAR_BYTES = 64


def model() -> nn.Module:
    """Matrices, a vector and a convolution, all of different sizes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 160), nn.Linear(160, 70, bias=False), nn.LayerNorm(70), nn.Conv2d(3, 5, 7))


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    return [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]


def test_room_is_alive_through_the_whole_step() -> None:
    step = record_optimizer_step(AdamW(model().parameters()), CPU)
    roomy = OptimizerStep(step.state_bytes, step.with_room(1000))
    assert peak_bytes(roomy) == peak_bytes(step) + 1000
    assert step.with_room(0) == step.events
    assert OptimizerStep(0, ()).with_room(1000) == ()


def measured(optimizer: Optimizer, module: nn.Module) -> tuple[int, int]:
    """State bytes after a real first step, and growth in a real second one."""
    give_gradients(module)
    optimizer.step()
    growth_bytes = measure_peak(optimizer.step, device=CPU).peak_growth_bytes
    return storage_bytes(state_tensors(optimizer)), growth_bytes


OPTIMIZERS: dict[str, Build] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "sgd with momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "sgd with nesterov and decay": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd with momentum, foreach": lambda p: SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adam": Adam,
    "adamw": AdamW,
    "adamw, for loop": lambda p: AdamW(p, foreach=False),
    "adamw, foreach": lambda p: AdamW(p, foreach=True),
    "adamw, fused": lambda p: AdamW(p, fused=True),
    "adamw with amsgrad": lambda p: AdamW(p, amsgrad=True, foreach=False),
    "adamw with lr as a tensor": lambda p: AdamW(p, lr=torch.tensor(1e-3), foreach=False),
    "adagrad": Adagrad,
    "adagrad, foreach": lambda p: Adagrad(p, foreach=True),
    "rmsprop": RMSprop,
    "rmsprop, centered, with momentum": lambda p: RMSprop(p, centered=True, momentum=0.9),
    "rmsprop, foreach": lambda p: RMSprop(p, foreach=True),
    "adafactor": Adafactor,
    "adafactor, foreach": lambda p: Adafactor(p, foreach=True),
}
every_optimizer = pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS)


def check(build: Callable[[nn.Module], Optimizer], make: Callable[[], nn.Module] = model) -> None:
    module = make()
    optimizer = build(module)
    predicted = record_optimizer_step(optimizer, CPU)
    state_bytes, growth_bytes = measured(optimizer, module)
    slack = SCALAR_BYTES * len(list(module.parameters()))
    assert predicted.state_bytes == state_bytes
    assert peak_bytes(predicted) == pytest.approx(growth_bytes, rel=0.01, abs=slack)


@every_optimizer
def test_state_and_working_memory_of_a_real_step(build: Build) -> None:
    check(lambda module: build(module.parameters()))


@every_optimizer
def test_same_prediction_before_and_after_the_first_step(build: Build) -> None:
    module = model()
    optimizer = build(module.parameters())
    before = record_optimizer_step(optimizer, CPU)
    give_gradients(module)
    optimizer.step()
    assert record_optimizer_step(optimizer, CPU) == before


def bf16_model() -> nn.Module:
    return model().bfloat16()


@pytest.mark.parametrize("name", ["sgd with momentum", "adamw, for loop", "adamw, foreach", "rmsprop"])
def test_low_precision_parameters(name: str) -> None:
    check(lambda module: OPTIMIZERS[name](module.parameters()), bf16_model)


def frozen_model() -> nn.Module:
    module = model()
    module[1].requires_grad_(False)
    return module


@pytest.mark.parametrize("name", ["sgd with momentum", "adamw, for loop", "adamw, foreach"])
def test_frozen_parameters_have_no_state(name: str) -> None:
    check(lambda module: OPTIMIZERS[name](module.parameters()), frozen_model)


def test_parameter_group_that_was_added_later() -> None:
    def build(module: nn.Module) -> Optimizer:
        optimizer = AdamW(module[0].parameters(), foreach=False)
        optimizer.add_param_group({"params": list(module[1].parameters()), "amsgrad": True})
        return optimizer

    check(build)


def _state(optimizer: Optimizer) -> Any:
    return copy.deepcopy(optimizer.state_dict())


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(itertools.starmap(_equal, zip(left, right, strict=True)))
    return bool(left == right)


@pytest.mark.parametrize("steps", [0, 2])
@every_optimizer
def test_real_optimizer_is_not_touched(build: Build, steps: int) -> None:
    module = model()
    optimizer = build(module.parameters())
    for _ in range(steps):
        give_gradients(module)
        optimizer.step()
    before = _state(optimizer), [p.detach().clone() for p in module.parameters()], torch.get_rng_state()
    grads, num_states = [p.grad for p in module.parameters()], len(optimizer.state)
    record_optimizer_step(optimizer, CPU)
    assert _equal((_state(optimizer), list(module.parameters()), torch.get_rng_state()), before)
    assert all(p.grad is grad for p, grad in zip(module.parameters(), grads, strict=True))
    assert len(optimizer.state) == num_states


def test_hooks_and_schedules_of_the_user_do_not_run() -> None:
    module = model()
    optimizer = AdamW(module.parameters())
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    record_optimizer_step(optimizer, CPU)
    assert calls == [] and schedule.last_epoch == 0


class Failing(SGD):
    """Cannot step over parameters that it does not know."""

    def __init__(self, params: Any, lr: float = 0.1, names: tuple[str, ...] = ()) -> None:
        super().__init__(params, lr=lr)
        self.names = names

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise KeyError(self.names[0])


class Twice(SGD):
    """Runs the model in its step, as sharpness-aware optimizers do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()
        super().step()


def test_optimizer_that_cannot_step_alone_is_counted_as_it_is() -> None:
    module = model()
    module[0].weight.requires_grad_(False)
    optimizer = Twice(module.parameters(), lr=0.1, momentum=0.9)
    give_gradients(module)
    module[0].bias.grad = None
    optimizer.step(lambda: None)
    state_bytes = storage_bytes(state_tensors(optimizer))
    largest_bytes = 4 * 96 * 160
    message = (
        rf"^cannot try out a step of Twice \(TypeError: .*\)\. Counted the {state_bytes} bytes of state that it has now and "
        rf"{largest_bytes} bytes of workspace; if it has not stepped yet, take one step before recording\.$"
    )
    with pytest.warns(UserWarning, match=message):
        found = record_optimizer_step(optimizer, CPU)
    assert found.state_bytes == state_bytes
    assert peak_bytes(found) == largest_bytes


def test_warning_names_the_callers_line() -> None:
    llama = GPTModel(llama_config(num_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=16))
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recollect.record(llama, (tokens, tokens), optimizer=Failing(llama.parameters()))
    assert [warning.filename for warning in caught] == [__file__]


def test_recorded_step_has_the_optimizers_peak() -> None:
    llama = GPTModel(llama_config(num_layers=2, hidden_size=64, num_attention_heads=2, vocab_size=2000))
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    optimizer = AdamW(llama.parameters(), lr=0.0, foreach=True)

    def step() -> None:
        llama(tokens, tokens).loss.backward()
        optimizer.step()

    profile = recollect.record(llama, (tokens, tokens), optimizer=optimizer)
    step()
    optimizer.zero_grad()
    predicted = recollect.classic_plan(profile, "keep_all").predicted_peak_bytes
    got = profile.persistent_bytes + measure_peak(step, device=CPU).peak_growth_bytes
    assert predicted == pytest.approx(got, rel=0.005)
