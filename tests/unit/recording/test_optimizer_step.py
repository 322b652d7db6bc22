"""What an optimizer step needs, predicted without touching the optimizer, against a real step: PyTorch's optimizers and others.

The others have 8-bit state, compiled steps, constructors of their own.
"""

import copy
import itertools
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adafactor, Adagrad, Adam, AdamW, Optimizer, RMSprop, SparseAdam
from torch.optim.optimizer import register_optimizer_step_post_hook

import recollect
from optimizer_steps import CPU, give_gradients, peak_bytes
from recollect.measuring.meter import measure_peak, storage_bytes
from recollect.recording.optimizer_step import OptimizerStep, record_optimizer_step
from recollect.recording.optimizers import present_state_bytes, state_tensors
from small_llama import llama_step

Build = Callable[[nn.Module], Optimizer]

# Optimizers work in fp32 scalars too (step counts, bias corrections): a few bytes for each parameter.
SCALAR_BYTES = 64


def model() -> nn.Sequential:
    """Matrices, vectors and a convolution, of sizes on both sides of 4096, of which 8-bit optimizers make a difference."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 160), nn.Linear(160, 64, bias=False), nn.LayerNorm(64), nn.Conv2d(4, 4, 8))


def test_room_is_alive_through_the_whole_step() -> None:
    step = record_optimizer_step(AdamW(model().parameters()), CPU)
    roomy = OptimizerStep(step.state_bytes, step.with_room(1000))
    assert peak_bytes(roomy) == peak_bytes(step) + 1000
    assert step.with_room(0) == step.events
    assert OptimizerStep(0, ()).with_room(1000) == ()


class EightBit(Optimizer):
    """Momentum as bytes with a scale for each 256, but in full precision for small parameters."""

    def __init__(self, params: Any, lr: float = 0.1, least_numel: int = 4096) -> None:
        super().__init__(params, {"lr": lr})
        self.least_numel = least_numel

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self._update(parameter, group["lr"])

    def _update(self, parameter: Tensor, lr: float) -> None:
        state = self.state[parameter]
        if parameter.numel() < self.least_numel:
            state.setdefault("momentum", torch.zeros_like(parameter)).add_(parameter.grad)
            parameter.add_(state["momentum"], alpha=-lr)
            return
        if not state:
            state["codes"] = torch.zeros_like(parameter, dtype=torch.int8)
            state["scale"] = torch.ones(parameter.numel() // 256, dtype=parameter.dtype, device=parameter.device)
        momentum = state["codes"].view(-1, 256) * state["scale"][:, None] + parameter.grad.view(-1, 256)
        state["scale"].copy_(momentum.abs().amax(1) / 127)
        state["codes"].copy_((momentum / state["scale"][:, None]).round().view_as(parameter))
        parameter.add_(momentum.view_as(parameter), alpha=-lr)


class Managed(EightBit):
    """Has settings for single parameters in a manager, as bitsandbytes has."""

    def __init__(self, params: Any, module: nn.Module) -> None:
        super().__init__(params)
        self.mng = SimpleNamespace(
            pid2config={id(module[0].weight): 10**6},  # type: ignore[index]
            index2config={},
            module_weight_config_triple=[(module[1], "weight", 10**6)],  # type: ignore[index]
        )

    def step(self, closure: Any = None) -> None:
        for module, name, config in self.mng.module_weight_config_triple:
            self.mng.pid2config[id(getattr(module, name))] = config
        super().step()

    def _update(self, parameter: Tensor, lr: float) -> None:
        self.least_numel = self.mng.pid2config.get(id(parameter), 4096)
        super()._update(parameter, lr)


class Compiled(EightBit):
    """Compiles what it does to each parameter, at the first step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
            torch.compile(_add_momentum, fullgraph=True, backend="aot_eager")(parameter, parameter.grad, momentum)


def _add_momentum(parameter: Tensor, gradient: Tensor, momentum: Tensor) -> None:
    momentum.mul_(0.9).add_(gradient)
    parameter.sub_(momentum.sin())


class ReadsNumbers(EightBit):
    """Asks for a number in a tensor, which fake tensors do not have."""

    @torch.no_grad()
    def _update(self, parameter: Tensor, lr: float) -> None:
        super()._update(parameter, lr * float((parameter.grad.norm() + 1).clamp(max=1).item()))


class NeedsRealMemory(AdamW):
    """Hands the address of its parameters to a kernel."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.param_groups[0]["params"][0].data_ptr()
        super().step()


class Named(AdamW):
    """Its constructor does not take parameter groups."""

    def __init__(self, *, model: nn.Module) -> None:
        super().__init__(model.parameters(), foreach=False)


class Nested(Optimizer):
    """Puts what it needs into attributes, among them another optimizer over the same parameters."""

    def __init__(self, model: nn.Module, *, lr: float) -> None:
        super().__init__(model.parameters(), {"lr": lr})
        self.model = model
        self.inner = SGD(model.parameters(), lr=lr, momentum=0.9)
        self.first = next(model.parameters())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.state[self.first].setdefault("sum", torch.zeros_like(self.first)).add_(self.first)
        self.first.mul_(0.5)


class ScheduleFree(AdamW):
    """Has a mode, and refuses to step in the wrong one."""

    is_training = False

    def train(self) -> None:
        self.is_training = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.is_training:
            raise RuntimeError("call train() first")
        super().step()


OPTIMIZERS: dict[str, Build] = {
    "sgd": lambda m: SGD(m.parameters(), lr=0.1),
    "sgd with momentum": lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9),
    "sgd with nesterov and decay": lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd with momentum, foreach": lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=True),
    "adam": lambda m: Adam(m.parameters()),
    "adamw": lambda m: AdamW(m.parameters()),
    "adamw, for loop": lambda m: AdamW(m.parameters(), foreach=False),
    "adamw, foreach": lambda m: AdamW(m.parameters(), foreach=True),
    "adamw, fused": lambda m: AdamW(m.parameters(), fused=True),
    "adamw with amsgrad": lambda m: AdamW(m.parameters(), amsgrad=True, foreach=False),
    "adamw with lr as a tensor": lambda m: AdamW(m.parameters(), lr=torch.tensor(1e-3), foreach=False),
    "adagrad": lambda m: Adagrad(m.parameters()),
    "adagrad, foreach": lambda m: Adagrad(m.parameters(), foreach=True),
    "rmsprop": lambda m: RMSprop(m.parameters()),
    "rmsprop, centered, with momentum": lambda m: RMSprop(m.parameters(), centered=True, momentum=0.9),
    "rmsprop, foreach": lambda m: RMSprop(m.parameters(), foreach=True),
    "adafactor": lambda m: Adafactor(m.parameters()),
    "adafactor, foreach": lambda m: Adafactor(m.parameters(), foreach=True),
    "8 bits": lambda m: EightBit(m.parameters()),
    "8 bits for smaller ones too": lambda m: EightBit(m.parameters(), least_numel=256),
    "8 bits, numbers read": lambda m: ReadsNumbers(m.parameters()),
    "settings for single parameters": lambda m: Managed(m.parameters(), m),
    "kernels by address": lambda m: NeedsRealMemory(m.parameters(), foreach=False),
    "another constructor": lambda m: Named(model=m),
    "another optimizer in it": lambda m: Nested(m, lr=0.1),
    "schedule-free": lambda m: ScheduleFree(m.parameters(), foreach=False),
    "schedule-free, foreach": lambda m: ScheduleFree(m.parameters(), foreach=True),
    "compiled": lambda m: Compiled(m.parameters()),
}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def step(optimizer: Optimizer, module: nn.Module) -> None:
    if hasattr(optimizer, "train"):
        optimizer.train()
    give_gradients(module)
    optimizer.step()


def check(build: Build, make: Callable[[], nn.Module] = model, *, checks_workspace: bool = True) -> None:
    """The state after a real step is as predicted, and so is what a later step makes."""
    module = make()
    optimizer = build(module)
    predicted = record_optimizer_step(optimizer, CPU)
    step(optimizer, module)
    assert predicted.state_bytes == present_state_bytes(optimizer, CPU) == storage_bytes(state_tensors(optimizer))
    if checks_workspace:
        growth_bytes = measure_peak(optimizer.step, device=CPU).peak_growth_bytes
        slack = SCALAR_BYTES * len(list(module.parameters()))
        assert peak_bytes(predicted) == pytest.approx(growth_bytes, rel=0.01, abs=slack)


@every_optimizer
def test_state_and_working_memory_of_a_real_step(name: str) -> None:
    # What a compiled step makes is the compiler's choice.
    check(OPTIMIZERS[name], checks_workspace=name != "compiled")


@every_optimizer
def test_same_prediction_before_and_after_the_first_step(name: str) -> None:
    module = model()
    optimizer = OPTIMIZERS[name](module)
    before = record_optimizer_step(optimizer, CPU)
    step(optimizer, module)
    assert record_optimizer_step(optimizer, CPU) == before


@pytest.mark.parametrize("name", ["sgd with momentum", "adamw, for loop", "adamw, foreach", "rmsprop"])
def test_low_precision_parameters(name: str) -> None:
    check(OPTIMIZERS[name], lambda: model().bfloat16())


def frozen_model() -> nn.Module:
    module = model()
    module[1].requires_grad_(False)
    return module


@pytest.mark.parametrize("name", ["sgd with momentum", "adamw, for loop", "adamw, foreach"])
def test_frozen_parameters_have_no_state(name: str) -> None:
    check(OPTIMIZERS[name], frozen_model)


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
def test_real_optimizer_is_not_touched(name: str, steps: int) -> None:
    """And no hook or schedule of the user's runs."""
    module = model()
    optimizer = OPTIMIZERS[name](module)
    for _ in range(steps):
        step(optimizer, module)
    calls: list[str] = []
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    of_all = register_optimizer_step_post_hook(lambda *_: calls.append("post, of any optimizer"))
    before = _state(optimizer), [p.detach().clone() for p in module.parameters()], torch.get_rng_state()
    grads, num_states = [p.grad for p in module.parameters()], (len(optimizer.state), len(state_tensors(optimizer)))
    record_optimizer_step(optimizer, CPU)
    of_all.remove()
    assert _equal((_state(optimizer), list(module.parameters()), torch.get_rng_state()), before)
    assert all(p.grad is grad for p, grad in zip(module.parameters(), grads, strict=True))
    assert (len(optimizer.state), len(state_tensors(optimizer))) == num_states
    assert calls == [] and schedule.last_epoch == 0


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_with_its_history_full(search: str | None) -> None:
    """It runs the model inside its step, so what it holds meanwhile counts as state."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    data, target = torch.randn(40, 32), torch.randn(40, 1)
    optimizer = LBFGS(module.parameters(), lr=0.5, history_size=4, line_search_fn=search)
    found = record_optimizer_step(optimizer, CPU)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (module(data) - target).square().mean()
        loss.backward()
        return loss

    for _ in range(4):
        optimizer.step(closure)
    vector_bytes = storage_bytes(module.parameters())
    real_bytes = storage_bytes(state_tensors(optimizer))
    held_bytes = found.state_bytes - real_bytes
    assert 0 < held_bytes <= (5 if search else 1) * vector_bytes
    # Forward and backward of the model come on top of what is held.
    forward_bytes = measure_peak(closure, device=CPU).peak_growth_bytes
    growth_bytes = measure_peak(lambda: optimizer.step(closure), device=CPU).peak_growth_bytes
    assert growth_bytes <= held_bytes + max(forward_bytes, peak_bytes(found)) + 1024


def test_sparse_gradients() -> None:
    module = nn.Embedding(500, 16, sparse=True)
    optimizer = SparseAdam(module.parameters())
    found = record_optimizer_step(optimizer, CPU)
    module(torch.arange(9)).sum().backward()
    optimizer.step()
    assert found.state_bytes == present_state_bytes(optimizer, CPU) == 2 * 500 * 16 * 4


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize(
    ("library", "name"),
    [
        *(("bitsandbytes.optim", name) for name in ("AdamW8bit", "PagedAdamW8bit", "Lion8bit", "AdamW")),
        *(("torchao.optim", name) for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")),
        *(("schedulefree", name) for name in ("AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree")),
    ],
)
def test_other_libraries(library: str, name: str) -> None:
    made = getattr(pytest.importorskip(library, reason=f"{library} is not installed"), name)
    with torch.compiler.set_stance("force_eager" if library == "torchao.optim" else "default"):
        # Kernels of the others are no ops on the CPU that a dispatch mode could see inside.
        check(lambda module: made(module.parameters(), lr=0.1), checks_workspace=library == "schedulefree")


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
    llama, batch = llama_step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recollect.record(llama, batch, optimizer=Failing(llama.parameters()))
    assert [warning.filename for warning in caught] == [__file__]


def test_recorded_step_has_the_optimizers_peak() -> None:
    llama, batch = llama_step(1, 2, hidden_size=64, vocab_size=2000)
    optimizer = AdamW(llama.parameters(), lr=0.0, foreach=True)

    def step() -> None:
        llama(**batch).loss.backward()
        optimizer.step()

    profile = recollect.record(llama, batch, optimizer=optimizer)
    step()
    optimizer.zero_grad()
    predicted = recollect.classic_plan(profile, "keep_all").predicted_peak_bytes
    got = profile.persistent_bytes + measure_peak(step, device=CPU).peak_growth_bytes
    assert predicted == pytest.approx(got, rel=0.005)
