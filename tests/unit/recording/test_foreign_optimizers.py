"""Steps of optimizers that are not PyTorch's: 8-bit state, compiled steps, other constructors; and PyTorch's unusual ones."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer, SparseAdam

from optimizer_steps import CPU, give_gradients, peak_bytes
from recollect.measuring.meter import measure_peak, storage_bytes
from recollect.recording.optimizer_step import record_optimizer_step
from recollect.recording.optimizers import present_state_bytes, state_tensors


def model() -> nn.Sequential:
    """Parameters on both sides of 4096 elements, of which 8-bit optimizers make a difference."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 64), nn.LayerNorm(64))


def check(build: Callable[[nn.Module], Optimizer], *, checks_workspace: bool = True) -> None:
    """The state after a real step is as predicted, and so is what a later step makes."""
    module = model()
    optimizer = build(module)
    found = record_optimizer_step(optimizer, CPU)
    assert state_tensors(optimizer) == []
    if hasattr(optimizer, "train"):
        optimizer.train()
    give_gradients(module)
    optimizer.step()
    assert found.state_bytes == present_state_bytes(optimizer, CPU) == storage_bytes(state_tensors(optimizer))
    if checks_workspace:
        growth_bytes = measure_peak(optimizer.step, device=CPU).peak_growth_bytes
        assert peak_bytes(found) == pytest.approx(growth_bytes, rel=0.02, abs=256)


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


FOREIGN: dict[str, Callable[[nn.Module], Optimizer]] = {
    "8 bits": lambda m: EightBit(m.parameters()),
    "8 bits for smaller ones too": lambda m: EightBit(m.parameters(), least_numel=256),
    "8 bits, numbers read": lambda m: ReadsNumbers(m.parameters()),
    "settings for single parameters": lambda m: Managed(m.parameters(), m),
    "kernels by address": lambda m: NeedsRealMemory(m.parameters(), foreach=False),
    "another constructor": lambda m: Named(model=m),
    "another optimizer in it": lambda m: Nested(m, lr=0.1),
    "schedule-free": lambda m: ScheduleFree(m.parameters(), foreach=False),
    "foreach": lambda m: ScheduleFree(m.parameters(), foreach=True),
    "compiled": lambda m: Compiled(m.parameters()),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_state_and_workspace_of_a_real_step(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        # What a compiled step makes is the compiler's choice.
        check(FOREIGN[name], checks_workspace=name != "compiled")


@pytest.mark.parametrize("name", FOREIGN)
def test_neither_optimizer_nor_model_is_touched(name: str) -> None:
    module = model()
    optimizer = FOREIGN[name](module)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    before = [parameter.detach().clone() for parameter in module.parameters()]
    record_optimizer_step(optimizer, CPU)
    assert all(torch.equal(p, b) for p, b in zip(module.parameters(), before, strict=True))
    assert calls == [] and state_tensors(optimizer) == []
    assert all(parameter.grad is None for parameter in module.parameters())


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
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = record_optimizer_step(optimizer, CPU)
    module(torch.arange(9)).sum().backward()
    optimizer.step()
    assert found.state_bytes == present_state_bytes(optimizer, CPU) == 2 * 500 * 16 * 4


def _bitsandbytes(name: str) -> Callable[[nn.Module], Optimizer]:
    library = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    return lambda module: getattr(library.optim, name)(module.parameters())


@pytest.mark.parametrize("name", ["AdamW8bit", "PagedAdamW8bit", "Lion8bit", "AdamW"])
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_bitsandbytes(name: str) -> None:
    # Its kernels are no ops on the CPU that a dispatch mode could see inside.
    check(_bitsandbytes(name), checks_workspace=False)


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_torchao(name: str) -> None:
    library = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    module = model()
    optimizer = getattr(library, name)(module.parameters())
    found = record_optimizer_step(optimizer, CPU)
    with torch.compiler.set_stance("force_eager"):
        give_gradients(module)
        optimizer.step()
    assert found.state_bytes == present_state_bytes(optimizer, CPU)


@pytest.mark.parametrize("name", ["AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"])
def test_schedulefree(name: str) -> None:
    library = pytest.importorskip("schedulefree", reason="schedulefree is not installed")
    check(lambda module: getattr(library, name)(module.parameters(), lr=0.1))
