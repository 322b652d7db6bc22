"""Ops run again under the settings of forward, whatever holds in backward, and leave those of backward as they are."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from blocks import Computes
from gradients import assert_same_gradients
from policies import FULL
from recollect.applying import apply_policy

pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")


def unit() -> Computes:
    """Products, a table of the default dtype, a convolution, and numbers too small to be normal. [n, 8] -> [n, 8]."""

    def run(self: Any, hidden: Tensor) -> Any:
        table = (torch.arange(8) / 3).to(hidden.dtype)
        tiny = (hidden * 1e-38 * 1e-3) * 1e38
        hidden = self.convolution((self.linear(hidden).tanh() * table)[:, None])[:, 0]
        return (hidden.sin() + tiny * 1e3).exp() * hidden

    return Computes(run, linear=nn.Linear(8, 8), convolution=nn.Conv1d(1, 1, 3, padding=1))


class Doubles(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.sin.default else result


class DoublesFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func in (torch.sin, Tensor.sin, torch.ops.aten.sin.default) else result


Around = Callable[[], AbstractContextManager[Any]]


def switched(switch: Callable[[Any], object], value: Any, otherwise: Any) -> Around:
    """What has a switch of PyTorch at a value within a block, and as it is otherwise behind it."""

    @contextmanager
    def around() -> Iterator[None]:
        switch(value)
        try:
            yield
        finally:
            switch(otherwise)

    return around


AROUND: dict[str, Around] = {
    "dispatch mode": Doubles,
    "function mode": DoublesFunctions,
    "flush denormals": switched(torch.set_flush_denormal, True, False),
    "without mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
    "deterministic": switched(torch.use_deterministic_algorithms, True, False),
    "matmul precision": switched(torch.set_float32_matmul_precision, "medium", "highest"),
    "default dtype": switched(torch.set_default_dtype, torch.float64, torch.float32),
}


def step(model: nn.Module, forward: Around, backward: Around) -> dict[str, Tensor]:
    model.zero_grad()
    data = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    with forward():
        loss = model(data).sum()
    with backward():
        loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def switches() -> tuple[Any, ...]:
    return (
        torch.get_default_dtype(),
        torch.backends.mkldnn.enabled,  # type: ignore[attr-defined]
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch._C._len_torch_dispatch_stack(),
    )


@pytest.mark.parametrize("where", ["forward", "backward", "both"])
@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_gradients_are_those_without_a_plan(around: Around, where: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(unit(), unit())
    forward = around if where != "backward" else nullcontext
    backward = around if where != "forward" else nullcontext
    expected = step(model, forward, backward)
    expected = {name: gradient.clone() for name, gradient in expected.items()}
    before = switches()
    with apply_policy(model, ["0", "1"], FULL):
        assert_same_gradients(expected, step(model, forward, backward))
    assert switches() == before


def test_switch_inside_of_forward() -> None:
    """Products note the settings themselves, since a module may change them around one of them."""

    def mixed(self: Any, hidden: Tensor) -> Tensor:
        with torch.backends.mkldnn.flags(enabled=False):
            hidden = torch.conv1d(hidden.sin(), self.convolution.weight)
        return torch.conv1d(hidden.sin(), self.convolution.weight).exp()

    class Notes(TorchDispatchMode):
        """Notes whether mkldnn is on when a convolution runs."""

        seen: list[bool] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.convolution.default:
                self.seen.append(torch.backends.mkldnn.enabled)  # type: ignore[attr-defined]
            return func(*args, **(kwargs or {}))

    model = nn.Sequential(Computes(mixed, convolution=nn.Conv1d(1, 1, 3, padding=1)))
    with apply_policy(model, ["0"], FULL), Notes() as notes:
        model(torch.randn(2, 1, 16)).sum().backward()
    # The second one is not needed again: `exp` saves its result, which is the unit's output.
    assert notes.seen == [False, True, False]
